"""One bucket on its way: gradients in, sum over ranks out, and what is remembered between steps.

A channel composes a codec, error feedback and a pattern of exchange. Residuals are in units of the *sum* over ranks:
what ranks and owners still owe adds up, whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors.buckets import Bucket, gradient
from compressors.codec import Codec, Compressor, Cooperative, Frame, Pattern
from compressors.codecs.rows import SparseRows
from compressors.exchange import Wire, all_gather, two_phase
from compressors.feedback import Residual
from compressors.kernels import Finite
from compressors.sums import CodedSum, Exchange


@dataclass(frozen=True)
class Stage:
    """What the optimizer wants exchanged in a step."""

    dense: bool = False
    """Whether compression is not to begin yet."""
    outgoing: Callable[[Parameter, Tensor], Tensor] | None = None
    """What goes out in place of a parameter's unscaled gradient."""
    weights: Callable[[Parameter], Tensor | None] | None = None
    """By what a parameter's entries are multiplied before the largest are chosen."""


_log = logging.getLogger(__name__)


class Channel(ABC):
    """The exchange of one bucket, step after step."""

    def __init__(self, bucket: Bucket, compressor: Compressor, wire: Wire) -> None:
        self.bucket = bucket
        self.wire = wire
        self.residual: Residual | None = None
        """What this rank has not sent of its own gradients."""
        self.owed: Residual | None = None
        """What this rank, as the owner of a slice, has not sent of the sum. Two-phase exchanges only."""
        self.momentum: Residual | None = None
        """This rank's momentum, where it is made before the exchange."""
        self.memory: dict[str, Tensor] = {}
        """What a cooperative compressor remembers; equal on all ranks."""
        self.shares: dict[str, Any] | None = None
        """How the ranks of a node share out the bucket, as JSON values, where they do."""
        self.unscales = compressor.unscales
        self.runs_at_once = False
        """Whether `run` always follows `load` before any other channel's."""
        self.goes_on = False
        """Whether a second operation, which may begin before all gradients are there, follows the first."""
        self._compressor = compressor
        if compressor.error_feedback and self.remembers is self:
            self.residual = self._new_residual(bucket.frame(0, wire.ranks, wire.rank).slices())
        self._values: Tensor | None = None
        self._dense_stage = False

    @property
    def remembers(self) -> Channel | None:
        """The channel that keeps what is remembered for the bucket, or for this rank's part of it."""
        return self

    def run(self, step: int) -> Exchange:
        """Exchange what was loaded; returns the sum over ranks."""
        values = self._loaded()
        frame = self.bucket.frame(step, self.wire.ranks, self.wire.rank)
        if self._dense_stage:
            self._absorb_owed(values, frame)
            return self._dense(values)
        return self._compressed(values, frame)

    def alone(self) -> Tensor:
        """What was loaded, all of it: a single rank has nobody to send to."""
        values = self._loaded()
        if self.residual is None:
            return values
        total = values.clone()
        values.zero_()  # the draft: nothing is left to send
        return total

    def _loaded(self) -> Tensor:
        values, self._values = self._values, None
        assert values is not None, "load() comes first"
        return values

    @abstractmethod
    def _compressed(self, values: Tensor, frame: Frame) -> Exchange:
        """Exchange `values`; leaves in them what was not sent."""

    def commit(self) -> None:
        """The step was taken: keep what it left to send."""
        for kept in (self.residual, self.owed, self.momentum):
            if kept is not None:
                kept.commit()

    def release(self) -> None:
        """Give back what is kept only to be used again: the next step will not need it."""
        return

    def load(self, inverse_scale: float, stage: Stage) -> Finite:
        """Take the bucket's gradients times `inverse_scale`; returns whether they are finite.

        Neither this nor `run`, up to its first operation, should wait for the device.
        """
        self._dense_stage = stage.dense
        if self.residual is not None:
            self._values = self.residual.draft
            return self.bucket.read(self._values, inverse_scale, self.residual.value, stage.outgoing)[1]
        first = self.bucket.parameters[0][1]
        dtype = self._compressor.carrier(first.dtype)
        if not self._compressor.bucketed and stage.outgoing is None:
            assert inverse_scale == 1.0, "left scaled"
            self._values = gradient(first).reshape(-1).to(dtype)
            return True  # not looked at: goes dense, so that the sum shows it
        self._values = self._room(dtype)
        return self.bucket.read(self._values, inverse_scale, None, stage.outgoing)[1]

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Flat memory for the bucket's values."""
        return torch.empty(self.bucket.numel, dtype=dtype, device=self.bucket.device)

    def restore_owed(self, value: Tensor) -> None:
        """Set what this rank owes as an owner to flat `value`."""
        self.owed = self._new_residual([self.bucket.frame(0, self.wire.ranks, self.wire.rank).slices()[self.wire.rank]])
        self.owed.value.copy_(value)

    def _new_residual(self, slices: Sequence[Frame]) -> Residual:
        """A residual of the values of `slices`, of zeros."""
        return Residual(sum(piece.numel for piece in slices), self.bucket.device)

    def _absorb_owed(self, values: Tensor, frame: Frame) -> None:
        """Send what this rank owes as an owner like a gradient of its own: this step has no owners."""
        if self.owed is not None:
            begin = sum(piece.numel for piece in frame.slices()[: frame.rank])
            values[begin : begin + self.owed.value.numel()] += self.owed.value
            self.owed.draft.zero_()

    def _dense(self, values: Tensor) -> Exchange:
        total = values
        if self.residual is not None:
            total = values.clone()
            values.zero_()  # the draft: nothing is left to send
        return (yield self.wire.all_reduce(total, self.bucket.name))


class CodecChannel(Channel):
    """Payloads of a codec, by the pattern that it asks for."""

    def __init__(self, bucket: Bucket, codec: Codec, wire: Wire) -> None:
        super().__init__(bucket, codec, wire)
        self.codec = codec
        self._pattern: Pattern | None = None
        self._rooms: dict[int, list[Tensor]] = {}

    def _room(self, dtype: torch.dtype) -> Tensor:
        frame = self.bucket.frame(0, self.wire.ranks, self.wire.rank)
        sent_as_they_are = self._dense_stage or self.codec.pattern(frame) == Pattern.DENSE
        if dtype != torch.float32 or sent_as_they_are or not self.runs_at_once:
            return super()._room(dtype)
        return self.wire.scratch(frame.numel, self.bucket.device)  # encoded before the first operation

    def release(self) -> None:
        self._rooms.clear()
        self.wire.release()

    def _compressed(self, values: Tensor, frame: Frame) -> Exchange:
        pattern = self.codec.pattern(frame)
        if pattern != self._pattern:
            _log.info("%s, %d elements: %s by %s", self.bucket.name, frame.numel, self.codec, pattern.value)
            self._pattern = pattern
        self.goes_on = pattern == Pattern.TWO_PHASE
        if not self.goes_on:
            self._absorb_owed(values, frame)
        match pattern:
            case Pattern.DENSE:
                return self._dense(values)
            case Pattern.ALL_REDUCE:
                return self._all_reduce(values, frame)
            case Pattern.ALL_GATHER:
                return self._all_gather(values, frame)
            case Pattern.TWO_PHASE:
                return self._two_phase(values, frame)

    def _all_reduce(self, values: Tensor, frame: Frame) -> Exchange:
        payload = yield self.wire.all_reduce(self._encode(values, frame), self.bucket.name)
        total = self.wire.scratch(frame.numel, values.device)
        self.codec.decode_into(payload, frame, total)
        return total

    def _all_gather(self, values: Tensor, frame: Frame) -> Exchange:
        payload = self._encode(values, frame)
        sizes = [self.codec.nbytes(frame)] * frame.ranks
        parts = yield from all_gather(self.wire, self.bucket.name, payload, sizes)
        total = self.wire.scratch(frame.numel, values.device).zero_()
        for part in parts:
            self.codec.decode_add(part, frame, total)
        return total

    def _two_phase(self, values: Tensor, frame: Frame) -> Exchange:
        slices = frame.slices()
        own = slices[frame.rank]
        if self.residual is not None and self.owed is None:
            self.owed = self._new_residual([own])
        parts = self._encode_slices(values, frame)
        sizes = [self.codec.nbytes(piece) for piece in slices]
        merged = yield from two_phase(self.wire, self.bucket.name, parts, partial(self._merge, own=own), sizes)
        return CodedSum(self.codec, merged, slices, self.wire)

    def _merge(self, parts: list[Tensor], own: Frame) -> Tensor:
        """The payload of the sum of `parts`, all ranks' payloads of this rank's slice."""
        if self.owed is not None:
            total = self.owed.draft.copy_(self.owed.value)
        else:
            total = self.wire.scratch(own.numel, self.bucket.device).zero_()
        for part in parts:
            self.codec.decode_add(part, own, total)
        return self._encode(total, dataclasses.replace(own, phase=1))

    def _encode(self, values: Tensor, frame: Frame) -> Tensor:
        if self.residual is None:
            return self.codec.encode_in(values, frame, *self._payloads([frame]))
        return self.codec.encode_error(values, frame)

    def _encode_slices(self, values: Tensor, frame: Frame) -> list[Tensor]:
        rooms = self._payloads(frame.slices()) if self.residual is None else []
        return self.codec.encode_slices(values, frame, rooms)

    def _payloads(self, frames: Sequence[Frame]) -> list[Tensor]:
        """Room for the payloads of `frames`, all of one phase, one after the other in memory; the same in each step."""
        sizes = [self.codec.nbytes(frame) for frame in frames]
        kept = self._rooms.get(frames[0].phase, [])
        if [room.numel() for room in kept] != sizes:
            whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self.bucket.device)
            kept = self._rooms[frames[0].phase] = list(whole.split(sizes))
        return kept


class CooperativeChannel(Channel):
    """The rounds of a cooperative compressor."""

    def __init__(self, bucket: Bucket, compressor: Cooperative, wire: Wire) -> None:
        super().__init__(bucket, compressor, wire)
        self._cooperative = compressor
        self._draft: dict[str, Tensor] = {}

    def load(self, inverse_scale: float, stage: Stage) -> Finite:
        self._draft = dict(self.memory)
        return super().load(inverse_scale, stage)

    def _compressed(self, values: Tensor, frame: Frame) -> Exchange:
        if self._cooperative.starts_dense(frame.step):
            return (yield from self._dense(values))
        shapes = {name: parameter.shape for name, parameter in self.bucket.parameters}
        rounds = self._cooperative.rounds(values, shapes, frame, self._draft)
        part = next(rounds)
        for count in itertools.count():
            total = yield self.wire.all_reduce(part, f"{self.bucket.name}.round.{count}")
            try:
                part = rounds.send(total)
            except StopIteration as end:
                return end.value
        raise AssertionError("unreachable")

    def commit(self) -> None:
        super().commit()
        self.memory = self._draft


class RowsChannel(Channel):
    """The rows of one matrix that ranks touched."""

    def __init__(self, bucket: Bucket, compressor: SparseRows, wire: Wire) -> None:
        super().__init__(bucket, compressor, wire)
        self._rows = compressor

    def load(self, inverse_scale: float, stage: Stage) -> bool:
        assert stage.outgoing is not None or inverse_scale == 1.0, "left scaled"
        self._dense_stage = False  # nothing is lost, so there is nothing to wait for
        parameter = self.bucket.parameters[0][1]
        values = gradient(parameter) if inverse_scale == 1.0 else gradient(parameter) * inverse_scale
        self._values = values if stage.outgoing is None else stage.outgoing(parameter, values)
        return True  # not looked at: the sum shows it

    def _compressed(self, values: Tensor, frame: Frame) -> Exchange:
        joined = yield self.wire.all_gather(self._rows.encode(values), self.bucket.name)
        total = torch.zeros(values.shape, dtype=self._rows.carrier(values.dtype), device=values.device)
        self._rows.decode_add(joined, values.dtype, total)
        return total.view(-1)
