"""How kernels divide flat memory: what all paths have in common, and tables of it on the device.

Tables are made once for each layout and kept, because what goes from host to device in a step makes both wait.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 512
"""Elements that share a scale in `quantise`."""
_SAMPLES_ABOVE = 256  # sampled magnitudes that should lie above the threshold of a top-k selection
_TABLES = 4096  # kept of each kind: a few for each bucket


def blocks_in(sizes: tuple[int, ...]) -> int:
    """Number of blocks that `quantise` makes."""
    return sum(-(-size // BLOCK) for size in sizes)


def sample_of(numel: int, k: int) -> tuple[int, int] | None:
    """(stride, rank): the rank-th largest of every stride-th magnitude is most likely less than the k-th of all.

    None if all would be hardly more than the sample.
    """
    stride = k // _SAMPLES_ABOVE
    if stride < 4:
        return None
    sampled = -(-numel // stride)
    expected = sampled * k / numel
    return stride, min(sampled, int(expected + 4 * math.sqrt(expected)) + 1)


@lru_cache(_TABLES)
def table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """`numbers` as int64."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@lru_cache(_TABLES)
def block_lengths(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The int64 elements of each of the blocks that `quantise` makes."""
    return torch.from_numpy(_pieces(sizes, BLOCK)[1].astype(np.int64)).to(device)


class Pieces(NamedTuple):
    """Tensors that lie in flat memory, cut into pieces of equal length that begin anew with each tensor."""

    begins: Tensor
    """First element of each piece, int64."""
    lengths: Tensor
    """Elements of each piece, int32."""
    bounds: Tensor
    """Pieces before each tensor, and of all, int64."""


@lru_cache(_TABLES)
def pieces(sizes: tuple[int, ...], length: int, device: torch.device) -> Pieces:
    """The pieces, of at most `length` elements, of tensors of `sizes`."""
    return Pieces(*(torch.from_numpy(table).to(device) for table in _pieces(sizes, length)))


def _pieces(sizes: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts = itertools.accumulate(sizes[:-1], initial=0) if sizes else ()
    per_tensor = [np.arange(start, start + size, length) for start, size in zip(starts, sizes, strict=True)]
    begins = np.concatenate([np.empty(0, np.int64), *per_tensor])
    counts = [len(part) for part in per_tensor]
    ends = np.repeat(np.cumsum(sizes, dtype=np.int64), counts)
    bounds = np.cumsum([0, *counts], dtype=np.int64)
    return begins, np.minimum(ends - begins, length).astype(np.int32), bounds


class Owners(NamedTuple):
    """To which tensors the elements of flat memory belong, cut into pieces that do not heed where tensors begin."""

    ends: Tensor
    """Last element + 1 of each tensor, int64."""
    first: Tensor
    """The tensor to which the first element of each piece belongs, and that of the last element of all, int32."""


@lru_cache(_TABLES)
def owners(sizes: tuple[int, ...], length: int, device: torch.device) -> Owners:
    """The owners, among tensors of `sizes`, of pieces of `length` elements."""
    ends = np.cumsum(sizes, dtype=np.int64)
    numel = sum(sizes)
    edges = np.append(np.arange(0, numel, length), max(numel - 1, 0))
    first = np.searchsorted(ends, edges, side="right").astype(np.int32)
    return Owners(torch.from_numpy(ends).to(device), torch.from_numpy(first).to(device))
