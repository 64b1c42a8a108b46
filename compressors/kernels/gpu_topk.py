"""The largest entries, in Triton: chosen without telling the host anything.

From a sample comes a threshold, and in one pass all elements from it up are collected, of which there should be hardly
more than are wanted. Where the sample misled, so that they are too few or too many, or where there is no sample, the
kernels of `_by_digits` find the k-th largest magnitude by its bits, eight at a time; they look, on the device, whether
they are needed, and return at once if not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels import eager
from compressors.kernels.launching import launch
from compressors.kernels.layout import sample_of

_BLOCK = 2048  # elements of a program


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    plan = sample_of(values.numel(), k) if sampled else None
    if plan is None:
        found = torch.empty(k, dtype=torch.int64, device=values.device)
        nothing = torch.zeros(1, dtype=torch.int32, device=values.device)
        _by_digits(values, k, nothing, 0, found)
        return found
    room = min(values.numel(), 2 * k)
    found, count = _from_sample(values, k, room, *plan)
    _by_digits(values, k, count, room, found)
    return found


def _from_sample(values: Tensor, k: int, room: int, stride: int, rank: int) -> tuple[Tensor, Tensor]:
    """(indices, elements from the threshold up): those are right if these are at least `k` and at most `room`."""
    threshold = values[::stride].abs().topk(rank, sorted=False).values.amin()
    entries = torch.full((room,), -1, dtype=torch.int64, device=values.device)
    count = torch.zeros(1, dtype=torch.int32, device=values.device)
    programs = triton.cdiv(values.numel(), _BLOCK)
    launch(_collect, programs, values, threshold, entries, count, room, values.numel(), _BLOCK)
    return eager.indices_of(entries.topk(k, sorted=False).values), count


def _by_digits(values: Tensor, k: int, count: Tensor, room: int, found: Tensor) -> None:
    """Write the indices to `found`, unless `count` says that they are there."""
    programs = triton.cdiv(values.numel(), _BLOCK)
    histograms = torch.zeros(4, 256, dtype=torch.int32, device=values.device)
    shared = (values, histograms, count, k, room, values.numel())
    for digit in range(4):
        launch(_count_digits, programs, *shared, digit, _BLOCK)
    chosen = torch.zeros(2, programs, dtype=torch.int32, device=values.device)
    launch(_count_chosen, programs, *shared, chosen, programs, _BLOCK)
    before = chosen.cumsum(1) - chosen
    launch(_select, programs, *shared, before, programs, found, _BLOCK)


@triton.jit
def _collect(values, threshold, entries, count, room, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries that compare as magnitudes do, and of equal magnitudes the first is the largest; in any order."""
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    magnitude = tl.abs(tl.load(values + offsets, offsets < numel, 0.0))
    chosen = (magnitude >= tl.load(threshold)) & (offsets < numel)
    number = chosen.to(tl.int32)
    place = tl.atomic_add(count, tl.sum(number)) + tl.cumsum(number, 0) - 1
    entry = (magnitude.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0xFFFFFFFF - offsets)
    tl.store(entries + place, entry, chosen & (place < room))


@triton.jit
def _served(count, k, room):  # type: ignore[no-untyped-def]
    number = tl.load(count)
    return (number >= k) & (number <= room)


@triton.jit
def _keys(values, numel, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of this program's elements, whether they are inside, and the 31 bits of their magnitudes."""
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    value = tl.load(values + offsets, offsets < numel, 0.0)
    return offsets, offsets < numel, tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def _kth(histograms, k, known: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first digits of the k-th largest key, and how many of the keys that begin so are among the `k` largest."""
    bins = tl.arange(0, 256)
    prefix = 0
    for digit in tl.static_range(known):
        counts = tl.load(histograms + digit * 256 + bins)
        above = tl.sum(counts) - tl.cumsum(counts, 0)
        here = (above < k) & (above + counts >= k)
        prefix = prefix * 256 + tl.sum(tl.where(here, bins, 0))
        k -= tl.sum(tl.where(here, above, 0))
    return prefix, k


@triton.jit
def _count_digits(values, histograms, count, k, room, numel, digit: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the keys that share the digits of the k-th largest found so far, count the next digits."""
    if _served(count, k, room):
        return
    _, counted, keys = _keys(values, numel, width)
    if digit > 0:
        prefix, _ = _kth(histograms, k, digit)
        counted &= (keys >> (32 - 8 * digit)) == prefix
    digits = tl.histogram((keys >> (24 - 8 * digit)) & 255, 256, counted)
    tl.atomic_add(histograms + digit * 256 + tl.arange(0, 256), digits, digits > 0)


@triton.jit
def _count_chosen(values, histograms, count, k, room, numel, chosen, programs, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of this program's keys are larger than the k-th largest, and how many are equal to it."""
    if _served(count, k, room):
        return
    _, inside, keys = _keys(values, numel, width)
    kth, _ = _kth(histograms, k, 4)
    program = tl.program_id(0)
    tl.store(chosen + program, tl.sum(((keys > kth) & inside).to(tl.int32)))
    tl.store(chosen + programs + program, tl.sum(((keys == kth) & inside).to(tl.int32)))


@triton.jit
def _select(values, histograms, count, k, room, numel, before, programs, found, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the indices of what is larger than the k-th largest and, of what equals it, of the first."""
    if _served(count, k, room):
        return
    offsets, inside, keys = _keys(values, numel, width)
    kth, ties = _kth(histograms, k, 4)
    program = tl.program_id(0)
    larger, equal = ((keys > kth) & inside).to(tl.int32), ((keys == kth) & inside).to(tl.int32)
    larger_before = tl.load(before + program) + tl.cumsum(larger, 0) - larger
    equal_before = tl.load(before + programs + program) + tl.cumsum(equal, 0) - equal
    place = larger_before + tl.minimum(equal_before, ties)
    tl.store(found + place, offsets, (larger > 0) | ((equal > 0) & (equal_before < ties)))
