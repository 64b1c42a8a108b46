"""The kernels as compiled loops, one thread each.

Signatures are those of `compressors.kernels`. Sums may be added in any order (so that they vectorise); everything else
rounds as torch does.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor

from compressors.kernels import eager
from compressors.kernels.layout import BLOCK, blocks_in, sample_of

_compiled = numba.njit(cache=True, nogil=True)
_reordered = numba.njit(cache=True, nogil=True, fastmath={"reassoc"})
_NUMBA_TYPES = (torch.float32, torch.float64)
_CHUNK = 4096  # elements whose magnitudes are added in their own type


def add_scaled(gradient: Tensor, factor: float, base: Tensor | None, out: Tensor) -> float:
    if out.dtype not in _NUMBA_TYPES:
        return float(eager.add_scaled(gradient, factor, base, out))
    source = gradient if gradient.dtype in _NUMBA_TYPES else gradient.to(out.dtype)
    if base is None:
        return float(_scale(source.numpy(), factor, out.numpy()))
    return float(_scale_and_add(source.numpy(), factor, base.numpy(), out.numpy()))


def all_finite(values: Tensor) -> bool:
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def magnitudes(values: Tensor, sizes: tuple[int, ...]) -> list[float]:
    return [float(_magnitude(part.numpy())) for part in values.split(list(sizes))]


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    array = values.numpy()
    candidates = _candidates(array, k) if sampled else None
    if candidates is None:
        return torch.from_numpy(_largest(np.abs(array), k))
    indices, magnitudes = candidates
    return torch.from_numpy(indices[_largest(magnitudes, k)].astype(np.int64))


def gather(values: Tensor, indices: Tensor) -> Tensor:
    if not indices.numel():
        return values[indices]
    return torch.from_numpy(values.numpy()[indices.numpy()])  # several times as fast


def scatter_add(indices: Tensor, added: Tensor, factor: float | Tensor, total: Tensor) -> None:
    _scatter_add(indices.numpy(), added.float().numpy(), np.float32(float(factor)), total.numpy())


def pack_signs(values: Tensor) -> Tensor:
    bits = torch.zeros(-(-values.numel() // 8), dtype=torch.uint8)
    _pack_signs(values.numpy(), bits.numpy())
    return bits


def take_signs(values: Tensor, scales: Tensor, sizes: tuple[int, ...], bits: Tensor) -> None:
    _take_signs(values.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), bits.numpy())


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor) -> None:
    _write_signs(bits.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), total.numpy(), True)


def set_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    _write_signs(bits.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), out.numpy(), False)


def quantise(values: Tensor, sizes: tuple[int, ...], levels: int, seed: int | None) -> tuple[Tensor, Tensor]:
    scales = torch.empty(blocks_in(sizes))
    multiples = torch.empty(values.numel(), dtype=torch.int8)
    low, high = (0, 0) if seed is None else (seed & 0xFFFFFFFF, seed >> 32)
    bounds = np.asarray(sizes, dtype=np.int64)
    key = (np.uint32(low), np.uint32(high))
    _quantise(values.numpy(), bounds, np.float32(levels), seed is not None, *key, scales.numpy(), multiples.numpy())
    return multiples, scales


def dequantise(multiples: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    _dequantise(multiples.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), out.numpy())


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
    found = np.empty(room + _CHUNK, np.int32 if values.size < 2**31 else np.int64)
    magnitudes = np.empty(room + _CHUNK, values.dtype)
    count = _all_from(values, threshold, found, magnitudes)
    return (found[:count], magnitudes[:count]) if count >= k else None


def _largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Indices, ascending, of the `k` largest; of equal ones the first."""
    kth = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    return _from_kth(magnitudes, kth, k)


@_compiled
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


@_reordered
def _scale(gradient, factor, out):  # type: ignore[no-untyped-def]
    total = 0.0
    scale = out.dtype.type(factor)
    for begin in range(0, out.size, _CHUNK):
        source, target = gradient[begin : begin + _CHUNK], out[begin : begin + _CHUNK]
        part = out.dtype.type(0)
        for i in range(target.size):
            value = out.dtype.type(source[i]) * scale
            target[i] = value
            part += abs(value)
        total += part
    return total


@_reordered
def _scale_and_add(gradient, factor, base, out):  # type: ignore[no-untyped-def]
    total = 0.0
    scale = out.dtype.type(factor)
    for begin in range(0, out.size, _CHUNK):
        end = begin + _CHUNK
        source, other, target = gradient[begin:end], base[begin:end], out[begin:end]
        part = out.dtype.type(0)
        for i in range(target.size):
            value = out.dtype.type(source[i]) * scale + other[i]
            target[i] = value
            part += abs(value)
        total += part
    return total


@_reordered
def _magnitude(values):  # type: ignore[no-untyped-def]
    total = 0.0
    for begin in range(0, values.size, _CHUNK):
        source = values[begin : begin + _CHUNK]
        part = values.dtype.type(0)
        for i in range(source.size):
            part += abs(source[i])
        total += part
    return total


@_compiled
def _all_from(values, threshold, found, magnitudes):  # type: ignore[no-untyped-def]
    """Write indices and magnitudes of the elements from `threshold` up; returns their number, or -1 if too many.

    `found` and `magnitudes` have room for _CHUNK more than may be found. Eights of elements are looked at first, as few
    of them hold one, and all without a branch: what does not count is overwritten.
    """
    total, whole = 0, values.size // 8 * 8
    eights = np.empty(_CHUNK // 8 + 1, np.int64)
    marks = np.empty(_CHUNK // 8, np.uint8)
    for begin in range(0, whole, _CHUNK):
        part = values[begin : min(begin + _CHUNK, whole)]
        for i in range(part.size // 8):
            marks[i] = _byte(
                abs(part[8 * i]) >= threshold,
                abs(part[8 * i + 1]) >= threshold,
                abs(part[8 * i + 2]) >= threshold,
                abs(part[8 * i + 3]) >= threshold,
                abs(part[8 * i + 4]) >= threshold,
                abs(part[8 * i + 5]) >= threshold,
                abs(part[8 * i + 6]) >= threshold,
                abs(part[8 * i + 7]) >= threshold,
            )
        count = 0
        for i in range(part.size // 8):
            eights[count] = 8 * i
            count += marks[i] != 0
        for first in eights[:count]:
            for i in range(first, first + 8):
                found[total], magnitudes[total] = begin + i, abs(part[i])
                total += abs(part[i]) >= threshold
        if total > found.size - _CHUNK:
            return -1
    for i in range(whole, values.size):
        found[total], magnitudes[total] = i, abs(values[i])
        total += abs(values[i]) >= threshold
    return total


@_compiled
def _byte(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """The bits of a byte, the highest first; written out, for so it vectorises."""
    return np.uint8(a << 7 | b << 6 | c << 5 | d << 4 | e << 3 | f << 2 | g << 1 | h)


@_compiled
def _scatter_add(indices, added, factor, total):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        total[indices[i]] += added[i] * factor


@_compiled
def _pack_signs(values, bits):  # type: ignore[no-untyped-def]
    whole = values.size // 8
    for i in range(whole):
        bits[i] = _byte(
            values[8 * i] >= 0,
            values[8 * i + 1] >= 0,
            values[8 * i + 2] >= 0,
            values[8 * i + 3] >= 0,
            values[8 * i + 4] >= 0,
            values[8 * i + 5] >= 0,
            values[8 * i + 6] >= 0,
            values[8 * i + 7] >= 0,
        )
    for i in range(8 * whole, values.size):
        if values[i] >= 0:
            bits[whole] |= np.uint8(128 >> (i - 8 * whole))


@_compiled
def _take_whole_bytes(values, scale, bits):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = 0
        for j in range(8):
            value = values[8 * i + j]
            positive = value >= 0
            byte = (byte << 1) | positive
            values[8 * i + j] = value - (scale if positive else -scale)
        bits[i] = byte


@_compiled
def _set_whole_bytes(bits, scale, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = bits[i]
        for j in range(8):
            out[8 * i + j] = scale if (byte >> (7 - j)) & 1 else -scale


@_compiled
def _add_whole_bytes(bits, scale, total):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = bits[i]
        for j in range(8):
            total[8 * i + j] += scale if (byte >> (7 - j)) & 1 else -scale


@_compiled
def _whole_bytes(begin, end):  # type: ignore[no-untyped-def]
    """The elements between that fill bytes of their own: first and last + 1; the same if there are none."""
    first = min((begin + 7) // 8 * 8, end)
    return first, max(first, end // 8 * 8)


@_compiled
def _take_signs(values, scales, sizes, bits):  # type: ignore[no-untyped-def]
    begin = 0
    bits[:] = 0
    for j in range(sizes.size):
        end, scale = begin + sizes[j], scales[j]
        first, last = _whole_bytes(begin, end)
        for edge_begin, edge_end in ((begin, first), (last, end)):
            for i in range(edge_begin, edge_end):
                positive = values[i] >= 0
                bits[i >> 3] |= np.uint8(positive << (7 - (i & 7)))
                values[i] -= scale if positive else -scale
        _take_whole_bytes(values[first:last], scale, bits[first // 8 : last // 8])
        begin = end


@_compiled
def _write_signs(bits, scales, sizes, out, add):  # type: ignore[no-untyped-def]
    begin = 0
    for j in range(sizes.size):
        end, scale = begin + sizes[j], scales[j]
        first, last = _whole_bytes(begin, end)
        for edge_begin, edge_end in ((begin, first), (last, end)):
            for i in range(edge_begin, edge_end):
                value = scale if (bits[i >> 3] >> (7 - (i & 7))) & 1 else -scale
                out[i] = out[i] + value if add else value
        if add:
            _add_whole_bytes(bits[first // 8 : last // 8], scale, out[first:last])
        else:
            _set_whole_bytes(bits[first // 8 : last // 8], scale, out[first:last])
        begin = end


@_compiled
def _uniform(index, low, high):  # type: ignore[no-untyped-def]
    """A draw in [0, 1) that depends on nothing but the index and the key: two rounds of a 32-bit mixing function."""
    word = index
    for key in (low, high):  # casts, because Numba's products of 32-bit integers have 64
        word = np.uint32(word ^ key)
        word = np.uint32(np.uint32(word ^ (word >> 16)) * np.uint32(0x7FEB352D))
        word = np.uint32(np.uint32(word ^ (word >> 15)) * np.uint32(0x846CA68B))
        word = np.uint32(word ^ (word >> 16))
    return np.float32(word >> 8) * np.float32(2.0**-24)


@_compiled
def _quantise(values, sizes, levels, draws, low, high, scales, multiples):  # type: ignore[no-untyped-def]
    begin, block = 0, 0
    for j in range(sizes.size):
        end = begin + sizes[j]
        for first in range(begin, end, BLOCK):
            part, out = values[first : min(first + BLOCK, end)], multiples[first : min(first + BLOCK, end)]
            largest = np.float32(0)
            for i in range(part.size):
                largest = max(largest, abs(part[i]))
            scale = max(largest / levels, np.float32(1.1754944e-38))
            scales[block] = scale
            block += 1
            if draws:
                for i in range(part.size):
                    rounded = np.floor(part[i] / scale + _uniform(np.uint32(first + i), low, high))
                    out[i] = np.int8(max(min(rounded, levels), -levels))
            else:
                for i in range(part.size):
                    out[i] = np.int8(max(min(np.rint(part[i] / scale), levels), -levels))
        begin = end


@_compiled
def _dequantise(multiples, scales, sizes, out):  # type: ignore[no-untyped-def]
    begin, block = 0, 0
    for j in range(sizes.size):
        end = begin + sizes[j]
        for first in range(begin, end, BLOCK):
            source, target, scale = (
                multiples[first : min(first + BLOCK, end)],
                out[first : min(first + BLOCK, end)],
                scales[block],
            )
            for i in range(target.size):
                target[i] = np.float32(source[i]) * scale
            block += 1
        begin = end
