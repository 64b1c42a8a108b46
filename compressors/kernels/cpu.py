"""The kernels as compiled loops, one thread each.

Signatures are those of `compressors.kernels`. Sums may be added in any order (so that they vectorise); everything else
rounds as torch does.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from compressors.kernels import eager
from compressors.kernels.compiled import CHUNK, byte, compiled, reordered
from compressors.kernels.cpu_topk import top_k as top_k
from compressors.kernels.layout import BLOCK, blocks_in

_NUMBA_TYPES = (torch.float32, torch.float64)


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


@reordered
def _scale(gradient, factor, out):  # type: ignore[no-untyped-def]
    total = 0.0
    scale = out.dtype.type(factor)
    for begin in range(0, out.size, CHUNK):
        source, target = gradient[begin : begin + CHUNK], out[begin : begin + CHUNK]
        part = out.dtype.type(0)
        for i in range(target.size):
            value = out.dtype.type(source[i]) * scale
            target[i] = value
            part += abs(value)
        total += part
    return total


@reordered
def _scale_and_add(gradient, factor, base, out):  # type: ignore[no-untyped-def]
    total = 0.0
    scale = out.dtype.type(factor)
    for begin in range(0, out.size, CHUNK):
        end = begin + CHUNK
        source, other, target = gradient[begin:end], base[begin:end], out[begin:end]
        part = out.dtype.type(0)
        for i in range(target.size):
            value = out.dtype.type(source[i]) * scale + other[i]
            target[i] = value
            part += abs(value)
        total += part
    return total


@reordered
def _magnitude(values):  # type: ignore[no-untyped-def]
    total = 0.0
    for begin in range(0, values.size, CHUNK):
        source = values[begin : begin + CHUNK]
        part = values.dtype.type(0)
        for i in range(source.size):
            part += abs(source[i])
        total += part
    return total


@compiled
def _scatter_add(indices, added, factor, total):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        total[indices[i]] += added[i] * factor


@compiled
def _pack_signs(values, bits):  # type: ignore[no-untyped-def]
    whole = values.size // 8
    for i in range(whole):
        bits[i] = byte(
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


@compiled
def _take_whole_bytes(values, scale, bits):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = 0
        for j in range(8):
            value = values[8 * i + j]
            positive = value >= 0
            byte = (byte << 1) | positive
            values[8 * i + j] = value - (scale if positive else -scale)
        bits[i] = byte


@compiled
def _set_whole_bytes(bits, scale, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = bits[i]
        for j in range(8):
            out[8 * i + j] = scale if (byte >> (7 - j)) & 1 else -scale


@compiled
def _add_whole_bytes(bits, scale, total):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        byte = bits[i]
        for j in range(8):
            total[8 * i + j] += scale if (byte >> (7 - j)) & 1 else -scale


@compiled
def _whole_bytes(begin, end):  # type: ignore[no-untyped-def]
    """The elements between that fill bytes of their own: first and last + 1; the same if there are none."""
    first = min((begin + 7) // 8 * 8, end)
    return first, max(first, end // 8 * 8)


@compiled
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


@compiled
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


@compiled
def _uniform(index, low, high):  # type: ignore[no-untyped-def]
    """A draw in [0, 1) that depends on nothing but the index and the key: two rounds of a 32-bit mixing function."""
    word = index
    for key in (low, high):  # casts, because Numba's products of 32-bit integers have 64
        word = np.uint32(word ^ key)
        word = np.uint32(np.uint32(word ^ (word >> 16)) * np.uint32(0x7FEB352D))
        word = np.uint32(np.uint32(word ^ (word >> 15)) * np.uint32(0x846CA68B))
        word = np.uint32(word ^ (word >> 16))
    return np.float32(word >> 8) * np.float32(2.0**-24)


@compiled
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


@compiled
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
