"""bfloat16, which Horovod cannot sum: its bytes go to the owners of slices, who sum in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.codec import Frame, Pattern, PlacingCodec


class BF16(PlacingCodec):
    """Two-phase exchange in bfloat16: rounded once on the way to the owner, once on the way back.

    As many bytes as a float16 all-reduce, with float32's range and 8 bits of precision. No error feedback.
    """

    skips_small = False

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.TWO_PHASE

    def encode_in(self, values: Tensor, frame: Frame, room: Tensor) -> Tensor:
        room.view(torch.bfloat16).copy_(values)
        return room

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        aligned = payload if payload.storage_offset() % 2 == 0 else payload.clone()
        return aligned.view(torch.bfloat16).float()

    def nbytes(self, frame: Frame) -> int:
        return 2 * frame.numel
