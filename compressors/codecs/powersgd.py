"""Low-rank factors.

Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization", algorithm 1,
with warm start (section 4.2).
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from compressors.codec import Cooperative, Frame


class PowerSGD(Cooperative):
    """Each gradient, as a matrix [first dimension, all others], by two factors of `rank` columns.

    All-reduces ``rank * (rows + columns)`` float32 elements in two rounds, each one operation for a bucket. The
    second factor of a step starts the next. Matrices for which that saves less than half travel densely. The residual
    is a rank's own matrix without its own contribution to the sum. The same bits on all ranks need the same linear
    algebra: equal processors, libraries and thread counts.
    """

    def __init__(self, rank: int = 4, *, dense_steps: int = 0, seed: int = 0) -> None:
        """`dense_steps`: exact sums at the start, while gradients still turn fast. `seed` draws the first factors.

        Raises ValueError for a rank below 1 and negative steps.
        """
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        if dense_steps < 0:
            raise ValueError(f"dense_steps must not be negative, not {dense_steps}")
        self.rank = rank
        self.dense_steps = dense_steps
        self.seed = seed

    def accepts(self, shape: torch.Size, min_numel: int) -> bool:
        if len(shape) < 2 or not shape.numel() or shape.numel() < min_numel:
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return 2 * self._rank(shape) * (rows + columns) <= rows * columns

    def rounds(
        self, values: Tensor, shapes: dict[str, torch.Size], frame: Frame, memory: dict[str, Tensor]
    ) -> Generator[Tensor, Tensor, Tensor]:
        parts = values.split(list(frame.sizes))
        matrices = [part.view(shape[0], -1) for part, shape in zip(parts, shapes.values(), strict=True)]
        starts = [memory.get(name) for name in shapes]
        starts = [
            self._first(matrix, frame, index) if start is None else start
            for index, (matrix, start) in enumerate(zip(matrices, starts, strict=True))
        ]
        left = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        # Householder reflections give an orthonormal basis also for zero and dependent columns.
        left = [torch.linalg.qr(factor).Q for factor in _unflat((yield _flat(left)), left)]
        own = [matrix.t() @ factor for matrix, factor in zip(matrices, left, strict=True)]
        right = _unflat((yield _flat(own)), own)
        for matrix, factor, contribution in zip(matrices, left, own, strict=True):
            matrix.sub_(factor @ contribution.t())
        memory.update({name: factor.clone() for name, factor in zip(shapes, right, strict=True)})
        return _flat([a @ b.t() for a, b in zip(left, right, strict=True)])

    def _rank(self, shape: torch.Size) -> int:
        return min(self.rank, shape[0], shape.numel() // shape[0])

    def _first(self, matrix: Tensor, frame: Frame, index: int) -> Tensor:
        seed = frame.seed(self.seed + index, shared=True)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(matrix.shape[1], self._rank(matrix.shape), generator=generator).to(matrix.device)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflat(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
