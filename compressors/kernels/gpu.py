"""The kernels in Triton, for CUDA.

Signatures are those of `compressors.kernels`, but that all results stay on the device. Nothing waits for the device,
and no sum depends on the order in which programs happen to run. Products are not fused with sums, and quotients are
rounded to the nearest, so that results are those of the compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels import eager, layout
from compressors.kernels.gpu_topk import top_k as top_k
from compressors.kernels.launching import launch

_BLOCK = 2048  # elements of a program
_CHUNK = 1024  # partial sums that are added at once

adam_step = eager.adam_step
adam_weights = eager.adam_weights
all_finite = eager.all_finite
gather = eager.gather


def add_scaled(gradient: Tensor, factor: float, base: Tensor | None, out: Tensor) -> Tensor:
    if out.dtype != torch.float32:
        return eager.add_scaled(gradient, factor, base, out)
    return _load(gradient, factor, base, None, out)


def clear_unless(kept: Tensor, values: Tensor) -> None:
    if values.dtype != torch.float32:
        eager.clear_unless(kept, values)
        return
    launch(_clear_unless, triton.cdiv(values.numel(), _BLOCK), kept, values, values.numel(), _BLOCK)


def magnitudes(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    pieces = layout.pieces(sizes, _BLOCK, values.device)
    partial = torch.empty(len(pieces.begins), dtype=torch.float64, device=values.device)
    sums = torch.empty(len(sizes), dtype=torch.float64, device=values.device)
    launch(_magnitudes, len(partial), values, pieces.begins, pieces.lengths, partial, _BLOCK)
    launch(_sum_runs, len(sums), partial, pieces.bounds, sums, _CHUNK)
    return sums


def scatter_add(indices: Tensor, added: Tensor, factor: float | Tensor, total: Tensor) -> None:
    scale = factor if isinstance(factor, Tensor) else torch.full((1,), factor, device=total.device)
    count = indices.numel()
    launch(_scatter_add, triton.cdiv(count, _BLOCK), indices, added, scale, total, count, _BLOCK)


def pack_signs(values: Tensor) -> Tensor:
    bits = torch.empty(-(-values.numel() // 8), dtype=torch.uint8, device=values.device)
    _launch_signs(_pack_signs, values, bits)
    return bits


def take_signs(values: Tensor, scales: Tensor, sizes: tuple[int, ...], bits: Tensor) -> None:
    _launch_signs(_take_signs, values, bits, scales, *layout.owners(sizes, _BLOCK, values.device))


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor) -> None:
    _launch_signs(_add_signs, total, bits, scales, *layout.owners(sizes, _BLOCK, total.device))


def set_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    _launch_signs(_set_signs, out, bits, scales, *layout.owners(sizes, _BLOCK, out.device))


def load_signs(
    sources: Sequence[Tensor], factor: float, base: Tensor, sent: Tensor, out: Tensor, bits: Tensor
) -> list[Tensor]:
    pieces = eager.side_by_side(sources, sent, base, out)
    sums = [_load(source, factor, old, scale, new) for source, scale, old, new in pieces]
    _launch_signs(_pack_signs, out, bits)
    return sums


def quantise(values: Tensor, sizes: tuple[int, ...], levels: int, seed: int | None, out: Tensor) -> Tensor:
    pieces = layout.pieces(sizes, layout.BLOCK, values.device)
    scales = torch.empty(len(pieces.begins), device=values.device)
    low, high = (0, 0) if seed is None else (_signed_word(seed & eager.LOW_WORD), seed >> 32)
    where = (values, pieces.begins, pieces.lengths, scales, out)
    launch(_quantise, len(scales), *where, float(levels), low, high, seed is not None, layout.BLOCK)
    return scales


def dequantise(
    multiples: Tensor, scales: Tensor, sizes: tuple[int, ...], factor: float, out: Tensor, *, add: bool
) -> None:
    pieces = layout.pieces(sizes, layout.BLOCK, out.device)
    launch(_dequantise, len(scales), multiples, pieces.begins, pieces.lengths, scales, factor, out, add, layout.BLOCK)


def _load(gradient: Tensor, factor: float, base: Tensor | None, sent: Tensor | None, out: Tensor) -> Tensor:
    programs = triton.cdiv(out.numel(), _BLOCK)
    partial = torch.empty(programs, dtype=torch.float64, device=out.device)
    old, scale = (out if each is None else each for each in (base, sent))  # not read where there is none
    flags = (base is not None, sent is not None)
    launch(_add_scaled, programs, gradient, factor, old, scale, out, partial, out.numel(), *flags, _BLOCK)
    return partial.sum()


def _launch_signs(kernel: Any, values: Tensor, bits: Tensor, *scales: Tensor) -> None:
    launch(kernel, triton.cdiv(values.numel(), _BLOCK), values, bits, *scales, values.numel(), _BLOCK)


def _signed_word(word: int) -> int:
    """The int32 of the same bits: larger integers would make Triton compile the kernel once more."""
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _add_scaled(  # type: ignore[no-untyped-def]
    source,
    factor,
    base,
    sent,
    out,
    partial,
    numel,
    with_base: tl.constexpr,
    with_sent: tl.constexpr,
    width: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    inside = offsets < numel
    value = tl.load(source + offsets, inside, 0.0).to(tl.float32) * factor
    if with_base:
        old = tl.load(base + offsets, inside, 0.0)
        if with_sent:
            scale = tl.load(sent)
            old = tl.where(old >= 0, old - scale, old + scale)
        value += old
    tl.store(out + offsets, value, inside)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(inside, tl.abs(value), 0.0).to(tl.float64)))


@triton.jit
def _clear_unless(kept, values, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    end = tl.where(tl.load(kept).to(tl.int32) == 0, numel, 0)
    tl.store(values + offsets, tl.zeros([width], tl.float32), offsets < end)


@triton.jit
def _magnitudes(values, begins, lengths, partial, width: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = tl.program_id(0)
    within = tl.arange(0, width)
    value = tl.load(values + tl.load(begins + piece) + within, within < tl.load(lengths + piece), 0.0)
    tl.store(partial + piece, tl.sum(tl.abs(value).to(tl.float64)))


@triton.jit
def _sum_runs(partial, bounds, sums, width: tl.constexpr):  # type: ignore[no-untyped-def]
    run = tl.program_id(0)
    end = tl.load(bounds + run + 1)
    total = tl.zeros([width], tl.float64)
    for begin in range(tl.load(bounds + run), end, width):
        offsets = begin + tl.arange(0, width)
        total += tl.load(partial + offsets, offsets < end, 0.0)
    tl.store(sums + run, tl.sum(total))


@triton.jit
def _scatter_add(indices, added, factor, total, count, width: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    inside = offsets < count
    places = total + tl.load(indices + offsets, inside, 0).to(tl.int64)
    value = tl.load(added + offsets, inside, 0.0).to(tl.float32) * tl.load(factor)
    tl.store(places, tl.load(places, inside, 0.0) + value, inside)


@triton.jit
def _bytes(width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of this program's signs [width / 8, 1], and by how much each sign is shifted in them [1, 8]."""
    first = tl.program_id(0).to(tl.int64) * (width // 8)
    return (first + tl.arange(0, width // 8))[:, None], 7 - tl.arange(0, 8)[None, :]


@triton.jit
def _store_signs(value, bits, numel, byte, shift):  # type: ignore[no-untyped-def]
    packed = tl.sum((value >= 0).to(tl.int32) << shift, axis=1, keep_dims=True)
    tl.store(bits + byte, packed.to(tl.uint8), byte * 8 < numel)


@triton.jit
def _scale_of(offsets, scales, ends, first):  # type: ignore[no-untyped-def]
    """The scale of the tensor in which each element lies; most programs see but one tensor."""
    piece = tl.program_id(0)
    begin = tl.load(first + piece)
    scale = tl.zeros_like(offsets).to(tl.float32) + tl.load(scales + begin)
    for tensor in range(begin, tl.load(first + piece + 1)):
        scale = tl.where(offsets >= tl.load(ends + tensor), tl.load(scales + tensor + 1), scale)
    return scale


@triton.jit
def _pack_signs(values, bits, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    byte, shift = _bytes(width)
    offsets = byte * 8 + 7 - shift
    _store_signs(tl.load(values + offsets, offsets < numel, -1.0), bits, numel, byte, shift)


@triton.jit
def _take_signs(values, bits, scales, ends, first, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    byte, shift = _bytes(width)
    offsets = byte * 8 + 7 - shift
    value = tl.load(values + offsets, offsets < numel, -1.0)
    _store_signs(value, bits, numel, byte, shift)
    scale = _scale_of(offsets, scales, ends, first)
    tl.store(values + offsets, tl.where(value >= 0, value - scale, value + scale), offsets < numel)


@triton.jit
def _signed(bits, scales, ends, first, numel, byte, shift):  # type: ignore[no-untyped-def]
    """Offsets of this program's elements, and their scales with their signs."""
    offsets = byte * 8 + 7 - shift
    packed = tl.load(bits + byte, byte * 8 < numel, 0).to(tl.int32)
    scale = _scale_of(offsets, scales, ends, first)
    return offsets, tl.where(((packed >> shift) & 1) == 1, scale, -scale)


@triton.jit
def _add_signs(total, bits, scales, ends, first, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    byte, shift = _bytes(width)
    offsets, value = _signed(bits, scales, ends, first, numel, byte, shift)
    inside = offsets < numel
    tl.store(total + offsets, tl.load(total + offsets, inside, 0.0) + value, inside)


@triton.jit
def _set_signs(out, bits, scales, ends, first, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    byte, shift = _bytes(width)
    offsets, value = _signed(bits, scales, ends, first, numel, byte, shift)
    tl.store(out + offsets, value, offsets < numel)


@triton.jit
def _mix(word, key):  # type: ignore[no-untyped-def]
    word = word ^ key
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["low", "high"])
def _quantise(  # type: ignore[no-untyped-def]
    values, begins, lengths, scales, multiples, levels, low, high, draws: tl.constexpr, width: tl.constexpr
):
    block = tl.program_id(0)
    within = tl.arange(0, width)
    offsets = tl.load(begins + block) + within
    inside = within < tl.load(lengths + block)
    value = tl.load(values + offsets, inside, 0.0)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), levels), 2.0**-126)
    tl.store(scales + block, scale)
    exact = tl.div_rn(value, tl.zeros_like(value) + scale)
    if draws:
        word = _mix(offsets.to(tl.uint32), low.to(tl.uint32, bitcast=True))
        word = _mix(word, high.to(tl.uint32, bitcast=True))
        drawn = exact + (word >> 8).to(tl.float32) * 2.0**-24
        whole = drawn.to(tl.int32)  # towards zero; not tl.floor, which takes denormals for zero
        rounded = tl.where(whole > drawn, whole - 1, whole).to(tl.float32)
    else:
        rounded = (exact + 1.5 * 2.0**23) - 1.5 * 2.0**23  # the sum has no bits for a fraction: to the nearest, or even
    tl.store(multiples + offsets, tl.minimum(tl.maximum(rounded, -levels), levels).to(tl.int8), inside)


@triton.jit
def _dequantise(multiples, begins, lengths, scales, factor, out, add: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    within = tl.arange(0, width)
    offsets = tl.load(begins + block) + within
    inside = within < tl.load(lengths + block)
    value = tl.load(multiples + offsets, inside, 0).to(tl.float32) * tl.load(scales + block) * factor
    if add:
        value += tl.load(out + offsets, inside, 0.0)
    tl.store(out + offsets, value, inside)
