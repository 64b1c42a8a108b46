"""The kernels as compiled loops, one thread each.

Signatures are those of `compressors.kernels`. Sums may be added in any order (so that they vectorise); everything else
rounds as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compressors.kernels import eager
from compressors.kernels.compiled import CHUNK, compiled, positive, reordered
from compressors.kernels.cpu_adam import adam_step as adam_step
from compressors.kernels.cpu_adam import adam_weights as adam_weights
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
    _pack_signs(values.numpy(), bits.numpy(), 0)
    return bits


def load_signs(
    sources: Sequence[Tensor], factor: float, base: Tensor, sent: Tensor, out: Tensor, bits: Tensor
) -> list[float]:
    bits.zero_()
    sums, place = [], 0
    for source, scale, old, new in eager.side_by_side(sources, sent, base, out):
        part = source if source.dtype in _NUMBA_TYPES else source.float()
        arrays = (part.numpy(), np.float32(factor), old.numpy(), np.float32(float(scale)), new.numpy())
        sums.append(float(_load_signs(*arrays, bits.numpy(), place)))
        place += source.numel()
    return sums


def merge_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    base: Tensor,
    sent: Tensor,
    sizes: tuple[int, ...],
    out: Tensor,
    bits: Tensor,
) -> list[float]:
    bits.zero_()
    scales = np.stack([scale.numpy() for scale, _ in parts])
    coming = np.stack([signs.numpy() for _, signs in parts])
    bounds = np.asarray(sizes, dtype=np.int64)
    sums = np.empty(len(sizes))
    _merge_signs(coming, scales, base.numpy(), sent.numpy(), bounds, out.numpy(), bits.numpy(), sums)
    return list(sums)


def take_signs(values: Tensor, scales: Tensor, sizes: tuple[int, ...], bits: Tensor) -> None:
    bits.zero_()
    _take_signs(values.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), bits.numpy())


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor) -> None:
    _add_signs(bits.numpy(), scales.numpy(), np.asarray(sizes, dtype=np.int64), total.numpy())


def set_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    scatter_signs(bits, scales, out.split(list(sizes)))


def scatter_signs(bits: Tensor, scales: Tensor, outs: Sequence[Tensor]) -> None:
    place = 0
    for out, scale in zip(outs, scales.tolist(), strict=True):
        _set_signs(bits.numpy(), np.float32(scale), out.numpy(), place)
        place += out.numel()


def quantise(values: Tensor, sizes: tuple[int, ...], levels: int, seed: int | None, out: Tensor) -> Tensor:
    scales = torch.empty(blocks_in(sizes))
    low, high = (0, 0) if seed is None else (seed & 0xFFFFFFFF, seed >> 32)
    bounds = np.asarray(sizes, dtype=np.int64)
    key = (np.uint32(low), np.uint32(high))
    _quantise(values.numpy(), bounds, np.float32(levels), seed is not None, *key, scales.numpy(), out.numpy())
    return scales


def dequantise(
    multiples: Tensor, scales: Tensor, sizes: tuple[int, ...], factor: float, out: Tensor, *, add: bool
) -> None:
    bounds = np.asarray(sizes, dtype=np.int64)
    _dequantise(multiples.numpy(), scales.numpy(), bounds, np.float32(factor), out.numpy(), add)


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
def _pack_signs(values, bits, place):  # type: ignore[no-untyped-def]
    """Put a bit for each element into zeroed `bits`, from bit number `place` on."""
    first, last = _whole_bytes(place, place + values.size)
    for i in range(first // 8, last // 8):
        bits[i] = positive(values, 8 * i - place)  # type: ignore[call-arg]
    for edge_begin, edge_end in ((place, first), (last, place + values.size)):
        for i in range(edge_begin, edge_end):
            if values[i - place] >= 0:
                bits[i >> 3] |= np.uint8(128 >> (i & 7))


@compiled
def _whole_bytes(begin, end):  # type: ignore[no-untyped-def]
    """The bits between that fill bytes of their own: first and last + 1; the same if there are none."""
    first = min((begin + 7) // 8 * 8, end)
    return first, max(first, end // 8 * 8)


@compiled
def _signed(bits, i, scale):  # type: ignore[no-untyped-def]
    return scale if (bits[i >> 3] >> (7 - (i & 7))) & 1 else -scale


@compiled
def _set_signs(bits, scale, out, place):  # type: ignore[no-untyped-def]
    """Write the signs from bit number `place` on, times `scale`."""
    first, last = _whole_bytes(place, place + out.size)
    for edge_begin, edge_end in ((place, first), (last, place + out.size)):
        for i in range(edge_begin, edge_end):
            out[i - place] = _signed(bits, i, scale)
    whole, inside = bits[first // 8 : last // 8], out[first - place : last - place]
    for i in range(whole.size):
        byte = whole[i]
        for j in range(8):
            inside[8 * i + j] = scale if (byte >> (7 - j)) & 1 else -scale


@compiled
def _add_signs_from(bits, scale, total, place):  # type: ignore[no-untyped-def]
    """Add the signs from bit number `place` on, times `scale`."""
    first, last = _whole_bytes(place, place + total.size)
    for edge_begin, edge_end in ((place, first), (last, place + total.size)):
        for i in range(edge_begin, edge_end):
            total[i - place] += _signed(bits, i, scale)
    whole, inside = bits[first // 8 : last // 8], total[first - place : last - place]
    for i in range(whole.size):
        byte = whole[i]
        for j in range(8):
            inside[8 * i + j] += scale if (byte >> (7 - j)) & 1 else -scale


@compiled
def _add_signs(bits, scales, sizes, total):  # type: ignore[no-untyped-def]
    begin = 0
    for j in range(sizes.size):
        _add_signs_from(bits, scales[j], total[begin : begin + sizes[j]], begin)
        begin += sizes[j]


@compiled
def _leave(values, scale, out):  # type: ignore[no-untyped-def]
    """Write what is left of `values` when their signs times `scale` are sent."""
    for i in range(out.size):
        value = values[i]
        out[i] = value - (scale if value >= 0 else -scale)


@compiled
def _take_signs(values, scales, sizes, bits):  # type: ignore[no-untyped-def]
    begin = 0
    for j in range(sizes.size):
        end = begin + sizes[j]
        for first in range(begin, end, CHUNK):
            part = values[first : min(first + CHUNK, end)]
            _pack_signs(part, bits, first)
            _leave(part, scales[j], part)
        begin = end


@compiled
def _load_signs(source, factor, base, sent, out, bits, place):  # type: ignore[no-untyped-def]
    total = 0.0
    for begin in range(0, out.size, CHUNK):
        end = min(begin + CHUNK, out.size)
        new, old, target = source[begin:end], base[begin:end], out[begin:end]
        for i in range(target.size):
            value = old[i]
            target[i] = np.float32(new[i]) * factor + (value - (sent if value >= 0 else -sent))
        total += _magnitude(target)
        _pack_signs(target, bits, place + begin)
    return total


@compiled
def _merge_signs(coming, scales, base, sent, sizes, out, bits, sums):  # type: ignore[no-untyped-def]
    begin = 0
    for j in range(sizes.size):
        end, total = begin + sizes[j], 0.0
        for first in range(begin, end, CHUNK):
            last = min(first + CHUNK, end)
            target = out[first:last]
            _leave(base[first:last], sent[j], target)
            for rank in range(coming.shape[0]):
                _add_signs_from(coming[rank], scales[rank, j], target, first)
            total += _magnitude(target)
            _pack_signs(target, bits, first)
        sums[j] = total
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
def _dequantise(multiples, scales, sizes, factor, out, add):  # type: ignore[no-untyped-def]
    begin, block = 0, 0
    for j in range(sizes.size):
        end = begin + sizes[j]
        for first in range(begin, end, BLOCK):
            source, target, scale = (
                multiples[first : min(first + BLOCK, end)],
                out[first : min(first + BLOCK, end)],
                scales[block],
            )
            if add:
                for i in range(target.size):
                    target[i] += np.float32(source[i]) * scale * factor
            else:
                for i in range(target.size):
                    target[i] = np.float32(source[i]) * scale * factor
            block += 1
        begin = end
