"""The contract of a compressor.

There are two kinds. A codec turns a flat float32 tensor into a payload and back. It does not communicate: `channels`
carries payloads by the pattern that the codec asks for, and adds error feedback if the codec wants it. A cooperative
compressor computes with sums over ranks in several rounds. A new compressor is one file with one subclass and one line
in `registry`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compressors import kernels


class Pattern(enum.Enum):
    """How payloads travel."""

    DENSE = "dense"
    """All-reduce of the values themselves; the codec is not asked."""
    ALL_REDUCE = "all_reduce"
    """Payloads of all ranks are added by Horovod: for linear codes, with float16, float32 or float64 payloads."""
    ALL_GATHER = "all_gather"
    """Every rank gets every payload and adds what it decodes: for few bytes a rank."""
    TWO_PHASE = "two_phase"
    """All-to-all to the owners of slices, who decode, add and encode again, then all-gather: bytes per rank do not
    grow with the number of ranks."""


@dataclass(frozen=True)
class Frame:
    """What ranks know, besides the payload, of the values a payload stands for."""

    sizes: tuple[int, ...]
    """Elements of each tensor that lies in the values, one after the other."""
    step: int
    """Exchanges completed before this one."""
    ranks: int
    """Number of ranks whose values are added."""
    rank: int = 0
    """The rank that encodes."""
    stream: int = 0
    """Number of the bucket."""
    piece: int = 0
    """Number of the slice in the bucket."""
    phase: int = 0
    """0 for a rank's own values, 1 for a sum that its owner encodes."""

    def seed(self, base: int, *, shared: bool) -> int:
        """A seed for random draws that never repeats; if `shared`, the same on all ranks."""
        who = -1 if shared else self.rank
        key = repr((base, self.step, self.stream, self.piece, self.phase, who)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1

    @property
    def numel(self) -> int:
        """Elements of the values."""
        return sum(self.sizes)

    def slices(self) -> list[Frame]:
        """The frames of `ranks` slices of nearly equal length; slice r is owned by rank r."""
        bounds = [self.numel * owner // self.ranks for owner in range(self.ranks + 1)]
        return [
            dataclasses.replace(self.cut(begin, end), piece=owner)
            for owner, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]

    def cut(self, begin: int, end: int) -> Frame:
        """The frame of elements `begin` to `end`: the tensors, and parts of tensors, that lie between."""
        sizes, start = [], 0
        for size in self.sizes:
            common = min(end, start + size) - max(begin, start)
            if common > 0:
                sizes.append(common)
            start += size
        return dataclasses.replace(self, sizes=tuple(sizes))


class Compressor:
    """What ``DistributedOptimizer(compression=...)`` takes.

    Values are flat, contiguous and float32 (or `carrier`); they are finite, in unscaled units (any loss scale is
    taken out before). The same values and frame give the same bits.
    """

    error_feedback: bool = False
    """Whether what is not sent is kept and added to the next step's values."""
    skips_small: ClassVar[bool] = True
    """Whether parameters with fewer than two dimensions, and tiny ones, travel densely instead."""
    bucketed: ClassVar[bool] = True
    """Whether parameters travel together in flat buckets; else each has its own operation."""
    unscales: ClassVar[bool] = True
    """Whether the loss scale is taken out before encoding; a linear code without memory can do without."""

    def for_parameter(self, name: str) -> Compressor:
        """The compressor of the parameter called `name`."""
        return self

    def accepts(self, shape: torch.Size, min_numel: int) -> bool:
        """Whether a parameter of `shape` is compressed; if not, it travels densely."""
        return not self.skips_small or (len(shape) >= 2 and shape.numel() >= min_numel)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the flat values in which gradients of `dtype` are exchanged."""
        return torch.float32

    def starts_dense(self, step: int) -> bool:
        """Whether in step `step` nothing is compressed, or remembered, as the schedule has not come to it yet."""
        return False

    def settings(self) -> dict[str, Any]:
        """Everything on which ranks must agree, as JSON values."""
        return {"compressor": type(self).__name__, **{name: value for name, value in sorted(vars(self).items())}}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class Codec(Compressor, ABC):
    """A compressor that needs no communication: values to payload and back."""

    @abstractmethod
    def pattern(self, frame: Frame) -> Pattern:
        """How payloads of the whole bucket `frame` travel. Equal on all ranks."""

    @abstractmethod
    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        """The payload: flat, uint8 or (for `Pattern.ALL_REDUCE`) floating point. Leaves `values` as they are."""

    @abstractmethod
    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        """The float32 values, of `frame.numel` elements, that `payload` stands for.

        For `Pattern.ALL_REDUCE` also of a sum of payloads.
        """

    @abstractmethod
    def nbytes(self, frame: Frame) -> int:
        """Bytes of the payload of `frame`; depends on nothing else."""

    def encode_in(self, values: Tensor, frame: Frame, room: Tensor) -> Tensor:
        """As `encode`; the payload may lie in `room`, uint8 [``nbytes(frame)``], which is lent for that.

        It does not lie in the memory of `values`, which is used again while the payload travels.
        """
        return _apart(self.encode(values, frame), values)

    def encode_error(self, values: Tensor, frame: Frame) -> Tensor:
        """The payload of `values`, in which is left what it misses: values - decode(payload)."""
        payload = _apart(self.encode(values, frame), values)
        values.sub_(self.decode(payload, frame))
        return payload

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        """Write what `payload` stands for to float32 `out`."""
        out.copy_(self.decode(payload, frame))

    def decode_apart(self, payload: Tensor, frame: Frame, factor: float, outs: Sequence[Tensor]) -> kernels.Finite:
        """Write what `payload` stands for, times `factor`, to flat float32 `outs`, one for each of `frame.sizes`.

        Returns whether it is finite.
        """
        parts = self.decode(payload, frame).split(list(frame.sizes))
        sums = [kernels.add_scaled(part, factor, None, out) for part, out in zip(parts, outs, strict=True)]
        return kernels.finite_by(sums, outs)

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        """Add what `payload` stands for to `total`."""
        total.add_(self.decode(payload, frame))

    def encode_slices(self, values: Tensor, frame: Frame, rooms: Sequence[Tensor]) -> list[Tensor]:
        """The payload of each of `frame.slices()`, for its owner; it may lie in its part of `rooms` (see `encode_in`).

        Leaves in `values`, with error feedback, what they miss; else anything. A codec that divides a budget over the
        whole bucket overrides this; lengths may then differ from `nbytes`.
        """
        slices = frame.slices()
        parts = values.split([part.numel for part in slices])
        if self.error_feedback:
            return [self.encode_error(part, piece) for part, piece in zip(parts, slices, strict=True)]
        return [self.encode_in(*each) for each in zip(parts, slices, rooms, strict=True)]


class PlacingCodec(Codec):
    """A codec that writes its payload where it is to lie. Subclasses say how in `encode_in`, not in `encode`."""

    @abstractmethod
    def encode_in(self, values: Tensor, frame: Frame, room: Tensor) -> Tensor: ...

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        return self.encode_in(values, frame, torch.empty(self.nbytes(frame), dtype=torch.uint8, device=values.device))


class Cooperative(Compressor, ABC):
    """A compressor that computes with sums over ranks, in several rounds of all-reduce."""

    error_feedback = True
    dense_steps: int = 0
    """Steps at the start in which float32 sums travel instead."""

    def starts_dense(self, step: int) -> bool:
        return step < self.dense_steps

    @abstractmethod
    def rounds(
        self, values: Tensor, shapes: dict[str, torch.Size], frame: Frame, memory: dict[str, Tensor]
    ) -> Generator[Tensor, Tensor, Tensor]:
        """Yield flat floating-point tensors and receive their sums over ranks; return the float32 sum of values.

        Leaves in `values` what this rank's contribution to the sum misses. `shapes` are the names and shapes of the
        parameters that lie in the values. `memory` holds at most one tensor for each name, is empty at first and kept
        from step to step; it must be equal on all ranks, and its tensors are replaced, not changed in place.
        """


def _apart(payload: Tensor, values: Tensor) -> Tensor:
    """`payload`, in memory that is not that of `values`."""
    shared = payload.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    return payload.clone() if shared else payload


def to_bytes(parts: Sequence[Tensor]) -> Tensor:
    """One flat uint8 payload of contiguous tensors of any type, one after the other."""
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def from_bytes(payload: Tensor, *fields: tuple[torch.dtype, int]) -> list[Tensor]:
    """The tensors, given as (dtype, elements), of which `payload` was made. They may share its memory."""
    lengths = [dtype.itemsize * count for dtype, count in fields]
    assert sum(lengths) == payload.numel(), f"payload of {payload.numel()} bytes, expected {sum(lengths)}"
    parts = payload.split(lengths)
    return [_view(part, dtype) for part, (dtype, _) in zip(parts, fields, strict=True)]


def _view(part: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = part.storage_offset() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype)
