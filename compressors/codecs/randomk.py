"""Entries chosen at random, the same on all ranks.

Stich et al. 2018, "Sparsified SGD with memory", section 2; Wangni et al. 2018, "Gradient sparsification".
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from compressors.codec import Codec, Frame, Pattern


class RandomK(Codec):
    """Keep the fraction `density` of entries, drawn anew for each step and bucket from `seed` by a generator of its
    own. All ranks keep the same entries, so only float32 values travel, by all-reduce.

    Without error feedback kept entries are multiplied by numel/k, which makes them unbiased; with it (the default)
    they are not, which makes a contraction.
    """

    def __init__(self, density: float = 0.01, *, seed: int = 0, error_feedback: bool = True) -> None:
        """Raises ValueError for a density outside (0, 1]."""
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], not {density}")
        self.density = density
        self.seed = seed
        self.error_feedback = error_feedback

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.ALL_REDUCE

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        return values[self._indices(frame).to(values.device)] * self._factor(frame)

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        values = torch.zeros(frame.numel, device=payload.device)
        values[self._indices(frame).to(payload.device)] = payload
        return values

    def nbytes(self, frame: Frame) -> int:
        return 4 * self._kept(frame)

    def _kept(self, frame: Frame) -> int:
        return min(frame.numel, max(1, math.ceil(self.density * frame.numel)))

    def _factor(self, frame: Frame) -> float:
        return 1.0 if self.error_feedback or not frame.numel else frame.numel / self._kept(frame)

    def _indices(self, frame: Frame) -> Tensor:
        generator = np.random.Generator(np.random.Philox(frame.seed(self.seed, shared=True)))
        return torch.from_numpy(np.sort(generator.choice(frame.numel, self._kept(frame), replace=False)))
