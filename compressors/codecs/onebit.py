"""One bit for each element.

Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs"; scaled signs with error feedback as in Karimireddy et al. 2019, "Error feedback fixes SignSGD",
algorithm 1; two compressed phases as in Tang et al. 2021, "1-bit Adam", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        out = torch.empty(frame.numel, device=payload.device)
        self.decode_into(payload, frame, out)
        return out

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        scales, bits = self.fields(payload, frame)
        kernels.set_signs(bits, scales, frame.sizes, out)

    def decode_apart(self, payload: Tensor, frame: Frame, factor: float, outs: Sequence[Tensor]) -> kernels.Finite:
        scales, bits = self.fields(payload, frame)
        scales = scales * factor
        kernels.scatter_signs(bits, scales, outs)
        return kernels.all_finite(scales)

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        scales, bits = self.fields(payload, frame)
        kernels.add_signs(bits, scales, frame.sizes, total)

    def encode_error(self, values: Tensor, frame: Frame) -> Tensor:
        payload = torch.empty(self.nbytes(frame), dtype=torch.uint8, device=values.device)
        scales = self._scales(values, frame)
        payload[: scales.nbytes] = scales.view(torch.uint8)
        kernels.take_signs(values, scales, frame.sizes, payload[scales.nbytes :])
        return payload

    def nbytes(self, frame: Frame) -> int:
        return 4 * len(frame.sizes) + -(-frame.numel // 8)

    def fields(self, payload: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """The scales and the bits of `payload`, sharing its memory if that is aligned, as a new one's is."""
        scales, bits = from_bytes(payload, (torch.float32, len(frame.sizes)), (torch.uint8, -(-frame.numel // 8)))
        return scales, bits

    def _scales(self, values: Tensor, frame: Frame) -> Tensor:
        return kernels.means(kernels.magnitudes(values, frame.sizes), frame.sizes)
