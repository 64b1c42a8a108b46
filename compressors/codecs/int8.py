"""Stochastic rounding to 8-bit integers.

Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization and encoding", section 3.1, with
the largest magnitude of a block in place of its norm (section 5 there).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressors.codec import Codec, Frame, Pattern, from_bytes, to_bytes

_BLOCK = 512


class QSGD(Codec):
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

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        scales = self._scales(values, frame)
        exact = values / self._per_element(scales, frame)
        # For error feedback the nearest level; else up with the probability of the remainder.
        rounded = exact.round() if self.error_feedback else (exact + self._draws(frame, values)).floor()
        # Rounding in float32 can reach one level too far.
        return to_bytes([scales, rounded.clamp(-self.levels, self.levels).to(torch.int8)])

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        scales, quantised = from_bytes(payload, (torch.float32, self._blocks(frame)), (torch.int8, frame.numel))
        return quantised * self._per_element(scales, frame)

    def nbytes(self, frame: Frame) -> int:
        return 4 * self._blocks(frame) + frame.numel

    def _blocks(self, frame: Frame) -> int:
        return sum(-(-size // _BLOCK) for size in frame.sizes)

    def _scales(self, values: Tensor, frame: Frame) -> Tensor:
        """The size of one level in each block; any positive number where all elements are zero."""
        if not frame.sizes:
            return values.new_empty(0)
        parts = values.abs().split(list(frame.sizes))
        largest = torch.cat([pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK).amax(1) for part in parts])
        return (largest / self.levels).clamp_min(torch.finfo(torch.float32).tiny)

    def _per_element(self, scales: Tensor, frame: Frame) -> Tensor:
        lengths = [min(_BLOCK, size - begin) for size in frame.sizes for begin in range(0, size, _BLOCK)]
        return scales.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device=scales.device))

    def _draws(self, frame: Frame, values: Tensor) -> Tensor:
        generator = torch.Generator(values.device).manual_seed(frame.seed(self.seed, shared=False))
        return torch.rand(values.shape, generator=generator, device=values.device)
