"""Stochastic rounding to 8-bit integers.

Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization and encoding", section 3.1, with
the largest magnitude of a block in place of its norm (section 5 there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import kernels
from compressors.codec import Frame, Pattern, PlacingCodec, from_bytes


class QSGD(PlacingCodec):
    """One int8 for each element, and a float32 scale for each block of 512 elements of a tensor.

    Without error feedback values are rounded up or down at random, so that the expected value is exact (draws come
    from a generator of its own, seeded by `seed`, step, bucket and rank); with it, to the nearest. The two-phase
    exchange sends about a quarter of the bytes of a float32 all-reduce.
    """

    def __init__(self, levels: int = 127, *, seed: int = 0, error_feedback: bool = False) -> None:
        """`levels`: positive levels, at most 127. Raises ValueError for others."""
        if not 1 <= levels <= 127:
            raise ValueError(f"levels must be in 1..127, not {levels}")
        self.levels = levels
        self.seed = seed
        self.error_feedback = error_feedback

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.TWO_PHASE

    def encode_in(self, values: Tensor, frame: Frame, room: Tensor) -> Tensor:
        # For error feedback the nearest level; else up with the probability of the remainder.
        seed = None if self.error_feedback else frame.seed(self.seed, shared=False)
        header = self.nbytes(frame) - frame.numel
        scales = kernels.quantise(values, frame.sizes, self.levels, seed, room[header:].view(torch.int8))
        room[:header].copy_(scales.view(torch.uint8))
        return room

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        out = torch.empty(frame.numel, device=payload.device)
        self.decode_into(payload, frame, out)
        return out

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        kernels.dequantise(*self._fields(payload, frame), frame.sizes, out)

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        kernels.dequantise(*self._fields(payload, frame), frame.sizes, total, add=True)

    def decode_apart(self, payload: Tensor, frame: Frame, factor: float, outs: Sequence[Tensor]) -> kernels.Finite:
        multiples, scales = self._fields(payload, frame)
        blocks = [kernels.blocks_in((size,)) for size in frame.sizes]
        parts = zip(multiples.split(list(frame.sizes)), scales.split(blocks), outs, strict=True)
        for levels, scale, out in parts:
            kernels.dequantise(levels, scale, (out.numel(),), out, factor=factor)
        return kernels.all_finite(scales * self.levels * factor)  # the largest of a block is that many levels

    def nbytes(self, frame: Frame) -> int:
        return 4 * kernels.blocks_in(frame.sizes) + frame.numel

    def _fields(self, payload: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        blocks = kernels.blocks_in(frame.sizes)
        scales, multiples = from_bytes(payload, (torch.float32, blocks), (torch.int8, frame.numel))
        return multiples, scales
