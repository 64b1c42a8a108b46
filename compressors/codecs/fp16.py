"""Half precision, summed by Horovod."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.codec import Frame, Pattern, PlacingCodec


class FP16(PlacingCodec):
    """All-reduce in float16. Values are divided by the number of ranks first, so that the sum cannot overflow where
    the mean does not (stock Horovod sums first).

    The loss scale stays in, as it keeps small gradients above float16's smallest number, 6e-8. A mean beyond 65504
    becomes infinite and the step is skipped, as under automatic mixed precision. No error feedback.
    """

    skips_small = False
    unscales = False

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.ALL_REDUCE

    def encode_in(self, values: Tensor, frame: Frame, room: Tensor) -> Tensor:
        return torch.div(values, frame.ranks, out=room.view(torch.float16))

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        return payload.float().mul_(frame.ranks)

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        out.copy_(payload).mul_(frame.ranks)

    def nbytes(self, frame: Frame) -> int:
        return 2 * frame.numel
