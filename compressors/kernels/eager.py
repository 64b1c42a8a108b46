"""The kernels in torch's operations, for devices without kernels of their own.

Signatures are those of `compressors.kernels`, but that all results stay on the device. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressors.kernels import layout
from compressors.kernels.rules import AdamRule

LOW_WORD = 0xFFFFFFFF


def add_scaled(gradient: Tensor, factor: float, base: Tensor | None, out: Tensor) -> Tensor:
    if base is None:
        torch.mul(gradient.to(out.dtype), factor, out=out)
    else:  # which may be `out`
        torch.add(gradient.to(out.dtype) * factor, base, out=out)
    return out.abs().sum(dtype=torch.float64)


def all_finite(values: Tensor) -> Tensor:
    return values.isfinite().all()


def clear_unless(kept: Tensor, values: Tensor) -> None:
    values.masked_fill_(~kept, 0.0)


def magnitudes(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    sums = [part.abs().sum(dtype=torch.float64) for part in values.split(list(sizes))]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.float64, device=values.device)


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    # Of entries all different, so that of equal magnitudes the first are taken.
    places = torch.arange(values.numel(), device=values.device)
    entries = (values.abs().view(torch.int32).long() << 32) | (LOW_WORD - places)
    return indices_of(entries.topk(k, sorted=False).values)


def indices_of(entries: Tensor) -> Tensor:
    """The indices, ascending, of which `top_k` made the low words of `entries`."""
    return (LOW_WORD - (entries & LOW_WORD)).sort().values


def gather(values: Tensor, indices: Tensor) -> Tensor:
    return values[indices]


def scatter_add(indices: Tensor, added: Tensor, factor: float | Tensor, total: Tensor) -> None:
    total[indices.long()] += added.float() * factor


def pack_signs(values: Tensor) -> Tensor:
    padded = torch.zeros(-(-values.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
    padded[: values.numel()] = values >= 0
    return (padded.view(-1, 8) << _shifts(values.device)).sum(1, dtype=torch.uint8)


def take_signs(values: Tensor, scales: Tensor, sizes: tuple[int, ...], bits: Tensor) -> None:
    bits.copy_(pack_signs(values))
    add_signs(bits, -scales, sizes, values)


def load_signs(
    sources: Sequence[Tensor], factor: float, base: Tensor, sent: Tensor, out: Tensor, bits: Tensor
) -> list[Tensor]:
    sums = [
        add_scaled(source, factor, torch.where(old >= 0, old - scale, old + scale), new)
        for source, scale, old, new in side_by_side(sources, sent, base, out)
    ]
    bits.copy_(pack_signs(out))
    return sums


def side_by_side(
    sources: Sequence[Tensor], sent: Tensor, base: Tensor, out: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Each of `sources`, its scale in `sent`, and what of `base` and of `out` is at its place."""
    sizes = [source.numel() for source in sources]
    return zip(sources, sent, base.split(sizes), out.split(sizes), strict=True)


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor) -> None:
    total.add_(_signed(bits, scales, sizes, total.numel()))


def set_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    out.copy_(_signed(bits, scales, sizes, out.numel()))


def quantise(values: Tensor, sizes: tuple[int, ...], levels: int, seed: int | None, out: Tensor) -> Tensor:
    blocks = [
        pad(part.abs(), (0, -part.numel() % layout.BLOCK)).view(-1, layout.BLOCK) for part in _split(values, sizes)
    ]
    largest = torch.cat([values.new_empty(0), *(block.amax(1) for block in blocks)])
    # By a tensor, because torch may multiply by a number's reciprocal instead, which rounds otherwise.
    scales = (largest / torch.full_like(largest, levels)).clamp_min_(torch.finfo(torch.float32).tiny)
    exact = values / per_element(scales, sizes)
    rounded = exact.round() if seed is None else (exact + draws(values, seed)).floor()
    out.copy_(rounded.clamp_(-levels, levels))
    return scales


def dequantise(
    multiples: Tensor, scales: Tensor, sizes: tuple[int, ...], factor: float, out: Tensor, *, add: bool
) -> None:
    values = multiples * per_element(scales, sizes) * factor
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def per_element(scales: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The scale of each element's block."""
    repeats = layout.block_lengths(sizes, scales.device)
    return scales.repeat_interleave(repeats, output_size=sum(sizes))


def draws(values: Tensor, seed: int) -> Tensor:
    """float32 in [0, 1) for each element: what the compiled loops draw, in torch's words."""
    low, high, mask = seed & LOW_WORD, seed >> 32, LOW_WORD
    word = torch.arange(values.numel(), dtype=torch.int64, device=values.device) & mask
    for key in (low, high):
        word ^= key
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & mask
        word = ((word ^ (word >> 15)) * 0x846CA68B) & mask
        word ^= word >> 16
    return (word >> 8).float() * 2.0**-24


def _split(values: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return values.split(list(sizes)) if sizes else ()


def _signed(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], numel: int) -> Tensor:
    signs = ((bits.view(-1, 1) >> _shifts(bits.device)) & 1).bool().view(-1)[:numel]
    scale = scales.repeat_interleave(layout.table(sizes, scales.device), output_size=numel)
    return torch.where(signs, scale, -scale)


def _shifts(device: torch.device) -> Tensor:
    """By how many bits each of a byte's eight signs is shifted."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def adam_step(parameter: Tensor, momentum: Tensor, variance: Tensor, rule: AdamRule) -> None:
    direction = (momentum / rule.first).div_((variance / rule.second).sqrt_().add_(rule.eps))
    direction.clamp_(-rule.bound, rule.bound)
    if rule.still:
        direction.masked_fill_(variance == 0, 0.0)
    parameter.mul_(rule.decay).sub_(direction.mul_(rule.rate).to(parameter.dtype))


def adam_weights(variance: Tensor, correction: float, eps: float) -> Tensor:
    weights = (variance / correction).sqrt_().add_(eps).reciprocal_()
    return weights.masked_fill_(variance == 0, 0.0).float()
