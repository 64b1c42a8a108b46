"""Parameters gathered into flat buckets, in an order that does not depend on the rank.

One Horovod operation costs about one cycle of its background loop, so gradients of many parameters travel as one.
Buckets follow the reverse of the parameters' order, which is about the order in which backward makes gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors import kernels
from compressors.codec import Compressor, Frame


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together by one compressor."""

    index: int
    compressor: Compressor
    parameters: tuple[tuple[str, Parameter], ...]

    @property
    def name(self) -> str:
        """Name of the bucket's operations; equal on all ranks."""
        return f"bucket.{self.index}"

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """(name, first element, elements) of what of each parameter lies in the bucket: all of it."""
        return [(name, 0, parameter.numel()) for name, parameter in self.parameters]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements that each parameter has in the bucket."""
        return tuple(numel for _, _, numel in self.parts)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0][1].device

    def frame(self, step: int, ranks: int, rank: int) -> Frame:
        """The frame of the bucket's values."""
        return Frame(self.sizes, step, ranks, rank, self.index)

    def read(
        self,
        out: Tensor,
        inverse_scale: float,
        residual: Tensor | None,
        outgoing: Callable[[Parameter, Tensor], Tensor] | None = None,
    ) -> bool:
        """Write ``gradients * inverse_scale + residual`` to flat `out`; returns whether all are finite.

        With `outgoing`, what it makes of a parameter's unscaled gradient takes the gradient's place. If not all are
        finite, `out` is left zero, so that a step that will not be taken can still be encoded.
        """
        finite = True
        start = 0
        for _, parameter in self.parameters:
            part = slice(start, start + parameter.numel())
            base = None if residual is None else residual[part]
            source, factor = gradient(parameter), inverse_scale
            if outgoing is not None:
                source, factor = outgoing(parameter, source * inverse_scale), 1.0
            finite &= kernels.add_scaled(source.reshape(-1), factor, base, out[part])
            start = part.stop
        if not finite:
            out.zero_()
        return finite

    def write(self, total: Tensor, scale: float) -> None:
        """Set the gradients to flat ``total * scale``."""
        for (_, parameter), part in zip(self.parameters, total.split(list(self.sizes)), strict=True):
            target, source = gradient(parameter), part.view(parameter.shape)
            if target.dtype == source.dtype:
                torch.mul(source, scale, out=target)  # in place where an all-reduce left the sum there
            else:
                target.copy_(source * scale)


def gradient(parameter: Parameter) -> Tensor:
    """The gradient; zeros are put in its place where there is none, as other ranks may have one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def make_buckets(
    parameters: Iterable[tuple[str, Parameter]],
    compressor_of: Callable[[str, Parameter], Compressor],
    bucket_bytes: int,
) -> list[Bucket]:
    """Divide `parameters` into buckets of at most `bucket_bytes` float32 bytes (or one parameter).

    Those of a bucket share compressor and device. Compressors that are not `bucketed` get a bucket for each
    parameter. Empty parameters are left out.
    """
    groups: list[tuple[Compressor, list[tuple[str, Parameter]]]] = []
    open_groups: dict[tuple[int, torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(list(parameters)):
        if parameter.numel() == 0:
            continue
        compressor = compressor_of(name, parameter)
        key = (id(compressor), parameter.device, compressor.carrier(parameter.dtype))
        group = open_groups.get(key)
        held = sum(other.numel() for _, other in group) if group else 0
        if group is None or not compressor.bucketed or 4 * (held + parameter.numel()) > bucket_bytes:
            group = open_groups[key] = []
            groups.append((compressor, group))
        group.append((name, parameter))
    return [Bucket(index, compressor, tuple(members)) for index, (compressor, members) in enumerate(groups)]
