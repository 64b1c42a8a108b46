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
        return to_bytes([self._scales(values, frame, None), kernels.pack_signs(values)])

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        out = torch.empty(frame.numel, device=payload.device)
        self.decode_into(payload, frame, out)
        return out

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        kernels.set_signs(*self._fields(payload, frame), frame.sizes, out)

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        kernels.add_signs(*self._fields(payload, frame), frame.sizes, total)

    def encode_error(self, values: Tensor, frame: Frame, magnitudes: kernels.Sums | None = None) -> Tensor:
        """`magnitudes`: the sum of the magnitudes of each tensor, where it is known."""
        payload = torch.empty(self.nbytes(frame), dtype=torch.uint8, device=values.device)
        scales = self._scales(values, frame, magnitudes)
        header = payload[: scales.nbytes]
        header.copy_(scales.view(torch.uint8))
        kernels.take_signs(values, scales, frame.sizes, payload[scales.nbytes :])
        return payload

    def encode_slices(self, values: Tensor, frame: Frame, magnitudes: kernels.Sums | None = None) -> list[Tensor]:
        """`magnitudes`: the sums of the magnitudes of the tensors of all slices, where they are known."""
        if magnitudes is None:
            return super().encode_slices(values, frame)
        pieces, payloads, known = frame.slices(), [], 0
        for part, piece in zip(values.split([piece.numel for piece in pieces]), pieces, strict=True):
            last = known + len(piece.sizes)
            payloads.append(self.encode_error(part, piece, magnitudes[known:last]))
            known = last
        return payloads

    def nbytes(self, frame: Frame) -> int:
        return 4 * len(frame.sizes) + -(-frame.numel // 8)

    def _scales(self, values: Tensor, frame: Frame, sums: kernels.Sums | None) -> Tensor:
        return kernels.means(kernels.magnitudes(values, frame.sizes) if sums is None else sums, frame.sizes)

    def _fields(self, payload: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        scales, bits = from_bytes(payload, (torch.float32, len(frame.sizes)), (torch.uint8, -(-frame.numel // 8)))
        return bits, scales
