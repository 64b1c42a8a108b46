"""Loops over gradient memory: one compiled pass each on CPUs, torch operations elsewhere.

All tensors are flat and contiguous. The compiled loops are single-threaded: ranks usually share a machine's cores.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_compiled = numba.njit(cache=True, nogil=True)
_NUMBA_TYPES = (torch.float32, torch.float64)
_SAMPLES_ABOVE = 256  # sampled magnitudes that should lie above the threshold of a top-k selection


def add_scaled(gradient: Tensor, factor: float, base: Tensor | None, out: Tensor) -> bool:
    """Write ``gradient * factor + base`` to `out`; returns whether every element of it is finite."""
    if out.device.type != "cpu" or out.dtype not in _NUMBA_TYPES:
        torch.mul(gradient.to(out.dtype), factor, out=out)
        if base is not None:
            out.add_(base)
        return all_finite(out)
    source = gradient if gradient.dtype in _NUMBA_TYPES else gradient.to(out.dtype)
    if base is None:
        return bool(_scale(source.numpy(), factor, out.numpy()))
    return bool(_scale_and_add(source.numpy(), factor, base.numpy(), out.numpy()))


def all_finite(values: Tensor) -> bool:
    """Whether every element is finite."""
    # A sum is finite only if all its terms are; it can overflow without, which the slower look tells apart.
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    """The int64 indices, ascending, of the `k` elements largest in magnitude; of equal ones the first are taken.

    With `sampled`, a threshold estimated from a sample first leaves out elements that cannot be among them; the
    result is the same.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if values.device.type != "cpu":
        return torch.topk(values.abs(), k, sorted=False).indices.sort().values
    array = values.numpy()
    return torch.from_numpy(_indices_from(array, _kth_magnitude(array, k, sampled), k))


def pack_signs(values: Tensor) -> Tensor:
    """One bit for each element, 1 where it is >= 0 (also -0.0), first element in the highest bit, as uint8."""
    if values.device.type != "cpu":
        padded = torch.zeros(-(-values.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: values.numel()] = values >= 0
        return (padded.view(-1, 8) * _bit_values(values.device)).sum(1, dtype=torch.uint8)
    return torch.from_numpy(_pack_signs(values.numpy()))


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor, factor: float = 1.0) -> None:
    """Add ``factor * scales[j] * (+1 or -1)`` to the j-th of the tensors, of `sizes`, that lie in `total`."""
    if total.device.type != "cpu":
        signs = (bits.view(-1, 1) & _bit_values(bits.device)).ne(0).view(-1)[: total.numel()]
        lengths = torch.tensor(sizes, device=total.device)
        magnitudes = (scales * factor).repeat_interleave(lengths)
        total.add_(torch.where(signs, magnitudes, -magnitudes))
        return
    _add_signs(bits.numpy(), (scales * factor).numpy(), np.asarray(sizes, dtype=np.int64), total.numpy())


def _bit_values(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)


def _kth_magnitude(values: np.ndarray, k: int, sampled: bool) -> Any:
    stride = k // _SAMPLES_ABOVE
    if sampled and stride >= 4:
        sample = np.abs(values[::stride])
        expected = sample.size * k / values.size
        rank = min(sample.size, int(expected + 4 * math.sqrt(expected)) + 1)
        threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
        candidates = _magnitudes_from(values, threshold)
        if candidates.size >= k:  # fewer only if the sample misleads
            return np.partition(candidates, candidates.size - k)[candidates.size - k]
    magnitudes = np.abs(values)
    return np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]


@_compiled
def _scale(gradient, factor, out):  # type: ignore[no-untyped-def]
    bad = False
    scale = out.dtype.type(factor)
    for i in range(out.size):
        value = out.dtype.type(gradient[i]) * scale
        out[i] = value
        bad |= not (abs(value) < np.inf)
    return not bad


@_compiled
def _scale_and_add(gradient, factor, base, out):  # type: ignore[no-untyped-def]
    bad = False
    scale = out.dtype.type(factor)
    for i in range(out.size):
        value = out.dtype.type(gradient[i]) * scale + base[i]
        out[i] = value
        bad |= not (abs(value) < np.inf)
    return not bad


@_compiled
def _magnitudes_from(values, threshold):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(values.size):
        count += abs(values[i]) >= threshold
    found = np.empty(count, values.dtype)
    count = 0
    for i in range(values.size):
        if abs(values[i]) >= threshold:
            found[count] = abs(values[i])
            count += 1
    return found


@_compiled
def _indices_from(values, kth, k):  # type: ignore[no-untyped-def]
    ties = k
    for i in range(values.size):
        ties -= abs(values[i]) > kth
    found = np.empty(k, np.int64)
    count = 0
    for i in range(values.size):
        magnitude = abs(values[i])
        if magnitude > kth:
            found[count] = i
            count += 1
        elif magnitude == kth and ties > 0:
            found[count] = i
            count += 1
            ties -= 1
    return found


@_compiled
def _pack_signs(values):  # type: ignore[no-untyped-def]
    bits = np.zeros((values.size + 7) // 8, np.uint8)
    whole = values.size // 8
    for i in range(whole):
        byte = 0
        for j in range(8):
            byte = (byte << 1) | (values[8 * i + j] >= 0)
        bits[i] = byte
    for i in range(8 * whole, values.size):
        if values[i] >= 0:
            bits[whole] |= np.uint8(128 >> (i - 8 * whole))
    return bits


@_compiled
def _add_signs(bits, magnitudes, sizes, total):  # type: ignore[no-untyped-def]
    i = 0
    for j in range(sizes.size):
        magnitude = magnitudes[j]
        for _ in range(sizes[j]):
            positive = (bits[i >> 3] >> (7 - (i & 7))) & 1
            total[i] += magnitude if positive else -magnitude
            i += 1
