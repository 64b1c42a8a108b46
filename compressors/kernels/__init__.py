"""Loops over gradient memory: one compiled pass each on CPUs and CUDA devices, torch operations elsewhere.

All tensors are flat and contiguous, if nothing else is said. All paths give the same bits, but for sums of magnitudes,
which each adds in an order of its own, for square roots, and for what is rounded from them. On CPUs numbers come back
as Python's; elsewhere they stay on the device, and nothing waits for it. The loops on CPUs are single-threaded: ranks
usually share a machine's cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from compressors.kernels import cpu, eager
from compressors.kernels.layout import BLOCK, blocks_in, table
from compressors.kernels.rules import AdamRule

__all__ = [
    "BLOCK",
    "AdamRule",
    "Finite",
    "Sums",
    "adam_step",
    "adam_weights",
    "add_scaled",
    "add_signs",
    "all_finite",
    "blocks_in",
    "clear_unless_finite",
    "dequantise",
    "finite_by",
    "gather",
    "load_signs",
    "magnitudes",
    "means",
    "merge_signs",
    "pack_signs",
    "quantise",
    "scatter_add",
    "scatter_signs",
    "set_signs",
    "table",
    "take_signs",
    "top_k",
]

Finite = bool | Tensor
"""Whether numbers are finite: a bool, or a bool tensor [] on the device."""
Sums = Sequence[float] | Tensor
"""Sums of magnitudes: numbers, or a float64 tensor on the device."""


def add_scaled(gradient: Tensor, factor: float, base: Tensor | None, out: Tensor) -> float | Tensor:
    """Write ``gradient * factor + base`` to `out`; returns the sum of its magnitudes, not finite if an element is not.

    `base` may be `out`. The sum (a float64 tensor [] off CPUs) can also be infinite where elements are merely enormous.
    """
    return _path(out).add_scaled(gradient, factor, base, out)


def all_finite(values: Tensor) -> Finite:
    """Whether every element is finite."""
    return _path(values).all_finite(values)


def finite_by(sums: Sequence[float | Tensor], values: Sequence[Tensor]) -> Finite:
    """Whether all elements of `values` are finite, whose magnitudes add up to `sums`."""
    # A sum is finite only if all its terms are; it can overflow without, which the slower look tells apart.
    tensors = [each for each in sums if isinstance(each, Tensor)]
    if not tensors or len(tensors) < len(sums):
        return math.isfinite(sum(float(each) for each in sums)) or all(bool(all_finite(part)) for part in values)
    finite = torch.stack(tensors).isfinite().all()
    if all(part.dtype != torch.float64 for part in values):  # float64 sums of less do not overflow
        return finite
    return finite | torch.stack([part.isfinite().all() for part in values]).all()


def clear_unless_finite(values: Tensor, sums: Sequence[float | Tensor]) -> tuple[Sums, Finite]:
    """(`sums`, whether all elements of `values` are finite, whose magnitudes add up to them); if not, all become 0."""
    finite = finite_by(sums, [values])
    if isinstance(finite, bool):
        if finite:
            return [float(each) for each in sums], finite
        values.zero_()
        return [0.0] * len(sums), finite
    _path(values).clear_unless(finite, values)
    joined = torch.stack([each for each in sums if isinstance(each, Tensor)])
    return torch.where(finite, joined, 0.0), finite


def magnitudes(values: Tensor, sizes: tuple[int, ...]) -> Sums:
    """The sum of the magnitudes of each of the tensors, of `sizes`, that lie in `values`."""
    return _path(values).magnitudes(values, sizes)


def means(sums: Sums, sizes: tuple[int, ...]) -> Tensor:
    """The float32 quotients of `sums` and `sizes`, where the sums are."""
    if isinstance(sums, Tensor):
        return (sums / table(sizes, sums.device)).float()
    return torch.tensor([total / size for total, size in zip(sums, sizes, strict=True)], dtype=torch.float32)


def top_k(values: Tensor, k: int, *, sampled: bool) -> Tensor:
    """The int64 indices, ascending, of the `k` elements largest in magnitude; of equal ones the first are taken.

    With `sampled`, a threshold estimated from a sample first leaves out elements that cannot be among them; the
    result is the same. Off CPUs `values` are float32, less than 2**31.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    return _path(values).top_k(values, k, sampled=sampled)


def gather(values: Tensor, indices: Tensor) -> Tensor:
    """``values[indices]``."""
    return _path(values).gather(values, indices)


def scatter_add(indices: Tensor, added: Tensor, factor: float | Tensor, total: Tensor) -> None:
    """Add ``added * factor`` to the elements `indices`, all different, of float32 `total`.

    `factor`: a number, or float32 [1] where `total` is.
    """
    _path(total).scatter_add(indices, added, factor, total)


def pack_signs(values: Tensor) -> Tensor:
    """One bit for each element, 1 where it is >= 0 (also -0.0), first element in the highest bit, as uint8."""
    return _path(values).pack_signs(values)


def take_signs(values: Tensor, scales: Tensor, sizes: tuple[int, ...], bits: Tensor) -> None:
    """Write `pack_signs(values)` to `bits`, and leave in `values` what they and `scales` miss (see `add_signs`)."""
    _path(values).take_signs(values, scales, sizes, bits)


def add_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], total: Tensor) -> None:
    """Add ``scales[j] * (+1 or -1)`` to the j-th of the tensors, of `sizes`, that lie in float32 `total`."""
    _path(total).add_signs(bits, scales, sizes, total)


def set_signs(bits: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    """As `add_signs`, but in place of what is in `out`."""
    _path(out).set_signs(bits, scales, sizes, out)


def scatter_signs(bits: Tensor, scales: Tensor, outs: Sequence[Tensor]) -> None:
    """As `set_signs`, but the tensors lie in float32 `outs` of their own; on CPUs."""
    cpu.scatter_signs(bits, scales, outs)


def load_signs(
    sources: Sequence[Tensor], factor: float, base: Tensor, sent: Tensor, out: Tensor, bits: Tensor
) -> list[float] | list[Tensor]:
    """Write ``sources * factor + left`` to float32 `out`, one after the other, and its signs to `bits`.

    ``left[j]`` is what `base` misses when its signs times ``sent[j]`` are taken (see `take_signs`). Returns the sums
    of the magnitudes as `add_scaled` does, one for each of `sources`.
    """
    return _path(out).load_signs(sources, factor, base, sent, out, bits)


def merge_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    base: Tensor,
    sent: Tensor,
    sizes: tuple[int, ...],
    out: Tensor,
    bits: Tensor,
) -> Sums:
    """Write the sum of `parts`, which are (scales, bits), and of what `base` misses to `out`, and its signs to `bits`.

    `base` misses its signs times `sent`, one for each of the tensors, of `sizes`, that lie in it. Returns `magnitudes`
    of `out`.
    """
    path = _path(out)
    if path is cpu:
        return cpu.merge_signs(parts, base, sent, sizes, out, bits)
    path.take_signs(out.copy_(base), sent, sizes, bits)
    for scales, signs in parts:
        path.add_signs(signs, scales, sizes, out)
    bits.copy_(path.pack_signs(out))
    return path.magnitudes(out, sizes)


def quantise(values: Tensor, sizes: tuple[int, ...], levels: int, seed: int | None, out: Tensor) -> Tensor:
    """Write int8 multiples of the size of a level in each block to `out`; returns these sizes, float32 [blocks].

    Blocks of `BLOCK` elements begin anew with each of the tensors, of `sizes`, in `values`; the largest magnitude in a
    block is `levels` levels. An element becomes the nearest level or, with a 63-bit `seed`, one of its two neighbours
    at random, so that the mean is exact. The same seed gives the same draws on every device.
    """
    return _path(values).quantise(values, sizes, levels, seed, out)


def dequantise(
    multiples: Tensor, scales: Tensor, sizes: tuple[int, ...], out: Tensor, *, factor: float = 1.0, add: bool = False
) -> None:
    """Write the values of `quantise`, times `factor`, to float32 `out`, or add them to it."""
    _path(out).dequantise(multiples, scales, sizes, factor, out, add=add)


def adam_step(parameter: Tensor, momentum: Tensor, variance: Tensor, rule: AdamRule) -> None:
    """Move `parameter` as `rule` has it; tensors of one shape, which may be any."""
    _path(parameter).adam_step(parameter, momentum, variance, rule)


def adam_weights(variance: Tensor, correction: float, eps: float) -> Tensor:
    """``1 / (sqrt(variance / correction) + eps)`` as float32, 0 where the variance is; of any shape."""
    return _path(variance).adam_weights(variance, correction, eps)


def _path(values: Tensor) -> ModuleType:
    """The kernels for the device of `values`."""
    if values.device.type == "cpu":
        return cpu
    return _triton_path() if values.device.type == "cuda" else eager


@cache
def _triton_path() -> ModuleType:
    """The kernels for CUDA: Triton's, which torch for CUDA brings along; without Triton torch's operations."""
    try:
        from compressors.kernels import gpu
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return eager
    return gpu
