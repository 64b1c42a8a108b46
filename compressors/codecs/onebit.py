"""One bit for each element.

Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs"; scaled signs with error feedback as in Karimireddy et al. 2019, "Error feedback fixes SignSGD",
algorithm 1; two compressed phases as in Tang et al. 2021, "1-bit Adam", section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors import kernels
from compressors.codec import Codec, Frame, Pattern, from_bytes, to_bytes


class OneBit(Codec):
    """Signs, and for each tensor (or part of one in a slice) the mean magnitude as float32 scale.

    The mean magnitude is the scale that is nearest in the L2 sense. Zero counts as positive; a tensor of zeros has
    scale 0 and stays zero. The two-phase exchange sends (N-1)/N * numel/4 bytes and the scales.
    """

    error_feedback = True

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.TWO_PHASE

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        return to_bytes([self._scales(values, frame), kernels.pack_signs(values)])

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        total = torch.zeros(frame.numel, device=payload.device)
        self.decode_add(payload, frame, total)
        return total

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        scales, bits = self._fields(payload, frame)
        kernels.add_signs(bits, scales, frame.sizes, total)

    def encode_error(self, values: Tensor, frame: Frame) -> Tensor:
        payload = self.encode(values, frame)
        scales, bits = self._fields(payload, frame)
        kernels.add_signs(bits, scales, frame.sizes, values, factor=-1.0)
        return payload

    def nbytes(self, frame: Frame) -> int:
        return 4 * len(frame.sizes) + -(-frame.numel // 8)

    def _scales(self, values: Tensor, frame: Frame) -> Tensor:
        if not frame.sizes:
            return values.new_empty(0)
        return torch.stack([part.abs().mean() for part in values.split(list(frame.sizes))])

    def _fields(self, payload: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        scales, bits = from_bytes(payload, (torch.float32, len(frame.sizes)), (torch.uint8, -(-frame.numel // 8)))
        return scales, bits
