"""The largest elements, found by compiled loops of one thread."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compressors.kernels.compiled import CHUNK, compiled, large
from compressors.kernels.layout import sample_of

_FIRST = np.array([8, *(8 - mark.bit_length() for mark in range(1, 256))], np.int64)
"""For each byte the place of its first bit, counted from the highest."""
_OTHERS = np.array([0, *((1 << mark.bit_length() - 1) - 1 for mark in range(1, 256))], np.uint8)
"""For each byte the bits after its first."""


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    array = values.numpy()
    candidates = _candidates(array, k) if sampled else None
    if candidates is None:
        return torch.from_numpy(_largest(np.abs(array), k))
    indices, magnitudes = candidates
    return torch.from_numpy(indices[_largest(magnitudes, k)].astype(np.int64))


def _candidates(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Indices, ascending, and magnitudes of all elements from a sampled threshold up, at least `k`.

    None if the sample misleads.
    """
    plan = sample_of(values.size, k)
    if plan is None:
        return None
    stride, rank = plan
    sample = np.abs(values[::stride])
    threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
    room = min(values.size, 2 * k)
    found = np.empty(room + CHUNK, np.int32 if values.size < 2**31 else np.int64)
    magnitudes = np.empty(room + CHUNK, values.dtype)
    count = _all_from(values, threshold, found, magnitudes)
    return (found[:count], magnitudes[:count]) if count >= k else None


def _largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Indices, ascending, of the `k` largest; of equal ones the first."""
    kth = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    return _from_kth(magnitudes, kth, k)


@compiled
def _from_kth(magnitudes, kth, k):  # type: ignore[no-untyped-def]
    """Indices, ascending, of the `k` elements from `kth`, the k-th largest, up; of those equal to it the first."""
    ties = k
    for i in range(magnitudes.size):
        ties -= magnitudes[i] > kth
    found = np.empty(k + 1, np.int64)  # the last is overwritten by what is not found
    count = 0
    for i in range(magnitudes.size):
        tie = magnitudes[i] == kth and ties > 0
        ties -= tie
        found[count] = i
        count += tie or magnitudes[i] > kth
    return found[:k]


@compiled
def _all_from(values, threshold, found, magnitudes):  # type: ignore[no-untyped-def]
    """Write indices and magnitudes of the elements from `threshold` up; returns their number, or -1 if too many.

    `found` and `magnitudes` have room for CHUNK more than may be found. Eights of elements are looked at first, as few
    of them hold one, and without a branch: what does not count is overwritten.
    """
    total, whole = 0, values.size // 8 * 8
    eights = np.empty(CHUNK // 8 + 1, np.int64)
    marks = np.empty(CHUNK // 8, np.uint8)
    for begin in range(0, whole, CHUNK):
        part = values[begin : min(begin + CHUNK, whole)]
        for i in range(part.size // 8):
            marks[i] = large(part, 8 * i, threshold)  # type: ignore[call-arg]
        count = 0
        for i in range(part.size // 8):
            eights[count] = 8 * i
            count += marks[i] != 0
        for first in eights[:count]:
            mark = marks[first // 8]
            while mark:
                i = first + _FIRST[mark]
                found[total], magnitudes[total] = begin + i, abs(part[i])
                total += 1
                mark &= _OTHERS[mark]
        if total > found.size - CHUNK:
            return -1
    for i in range(whole, values.size):
        found[total], magnitudes[total] = i, abs(values[i])
        total += abs(values[i]) >= threshold
    return total
