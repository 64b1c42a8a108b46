"""Parameters gathered into flat buckets, in an order that does not depend on the rank.

One Horovod operation costs about one cycle of its background loop, so gradients of many parameters travel as one.
Buckets follow the reverse of the parameters' order, which is about the order in which backward makes gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors import kernels
from compressors.codec import Compressor, Frame
from compressors.codecs.none import DenseBuckets
from compressors.feedback import SignResidual

BUCKET_BYTES = 25 * 2**20
"""float32 bytes of gradients that travel as one, if nothing else is said."""


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
    ) -> tuple[kernels.Sums, kernels.Finite]:
        """Write ``gradients * inverse_scale + residual`` to flat `out`.

        With `outgoing`, what it makes of a parameter's unscaled gradient takes the gradient's place. Returns the sums
        of the parameters' magnitudes, and whether all elements are finite. If not, it leaves `out` and the sums zero,
        so that a step that will not be taken can still be encoded.
        """
        sums: list[float | Tensor] = []
        start = 0
        for source, factor in self._sources(inverse_scale, outgoing):
            stop = start + source.numel()
            base = None if residual is None else residual[start:stop]
            sums.append(kernels.add_scaled(source, factor, base, out[start:stop]))
            start = stop
        return kernels.clear_unless_finite(out, sums)

    def read_signs(
        self,
        slices: Sequence[Frame],
        inverse_scale: float,
        residual: SignResidual,
        outgoing: Callable[[Parameter, Tensor], Tensor] | None,
        bits: Sequence[Tensor],
    ) -> tuple[kernels.Sums, kernels.Finite]:
        """As `read` to the draft of `residual`, with the signs of each of `slices` written to `bits`.

        The sums are those of the tensors of all slices.
        """
        sums: list[float | Tensor] = []
        factor = inverse_scale if outgoing is None else 1.0
        sources = (source for source, _ in self._sources(inverse_scale, outgoing))
        start = 0
        for piece, parts, signs in zip(slices, cut(sources, slices), bits, strict=True):
            stop = start + piece.numel
            sent = residual.sent[len(sums) : len(sums) + len(parts)]
            where = (residual.before[start:stop], sent, residual.draft[start:stop], signs)
            sums += kernels.load_signs(parts, factor, *where)
            start = stop
        return kernels.clear_unless_finite(residual.draft, sums)

    def _sources(
        self, inverse_scale: float, outgoing: Callable[[Parameter, Tensor], Tensor] | None
    ) -> Iterator[tuple[Tensor, float]]:
        """What of each parameter goes out: (flat values, factor)."""
        for _, parameter in self.parameters:
            if outgoing is None:
                yield gradient(parameter).reshape(-1), inverse_scale
            else:
                unscaled = gradient(parameter) if inverse_scale == 1.0 else gradient(parameter) * inverse_scale
                yield outgoing(parameter, unscaled).reshape(-1), 1.0

    def flat_gradients(self) -> list[Tensor] | None:
        """The gradients, flat, where they can be written in place as float32."""
        every = [gradient(parameter) for _, parameter in self.parameters]
        if all(each.dtype == torch.float32 and each.is_contiguous() for each in every):
            return [each.view(-1) for each in every]
        return None

    def write(self, total: Tensor, scale: float) -> kernels.Finite:
        """Set the gradients to flat ``total * scale``; returns whether all are finite."""
        sums: list[float | Tensor] = []
        for (_, parameter), part in zip(self.parameters, total.split(list(self.sizes)), strict=True):
            target = gradient(parameter)
            if target.dtype == part.dtype and target.is_contiguous():  # in place where an all-reduce left the sum there
                sums.append(kernels.add_scaled(part, scale, None, target.view(-1)))
            else:
                target.copy_((part * scale).view(parameter.shape))
                sums.append(target.abs().sum(dtype=torch.float64))
        return kernels.finite_by(sums, [gradient(parameter) for _, parameter in self.parameters])


def cut(tensors: Iterable[Tensor], slices: Sequence[Frame]) -> Iterator[list[Tensor]]:
    """What of flat `tensors`, which lie one after the other, lies in each of `slices`."""
    source = iter(tensors)
    rest = torch.empty(0)
    for piece in slices:
        parts = []
        for size in piece.sizes:
            while not rest.numel():
                rest = next(source)
            parts.append(rest[:size])
            rest = rest[size:]
        yield parts


def gradient(parameter: Parameter) -> Tensor:
    """The gradient; zeros are put in its place where there is none, as other ranks may have one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def chosen_for(compression: Compressor, min_numel: int) -> Callable[[str, Parameter], Compressor]:
    """What compresses a parameter under `compression`; those of fewer than `min_numel` elements may travel densely."""
    dense = DenseBuckets()

    def compressor_of(name: str, parameter: Parameter) -> Compressor:
        chosen = compression.for_parameter(name)
        return chosen if chosen.accepts(parameter.shape, min_numel) else dense

    return compressor_of


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
