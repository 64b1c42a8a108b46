"""The time of a training step under compression: work, coding, and an alpha-beta model of the exchange.

A round is what one bucket's operation waits for and its next one follows: all-reduces have one, two-phase exchanges and
PowerSGD two. A round costs what Horovod needs to agree on it, then the messages of its collectives, then its bytes:

    step = work + coding + sum over rounds (fixed + hop * messages + bytes / rate) - hidden
    hidden = overlap * min(bytes that may travel during backward / rate, seconds of that backward pass)

Messages that follow one another on N ranks are 2 log2 N for an all-reduce, log2 N for an all-gather, N - 1 for an
all-to-all (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH",
sections 4.1, 4.2 and 4.5). Horovod fuses the all-reduces and all-gathers of a round, each kind to one; not all-to-alls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compressors.rehearsal import Kind, Operation, Rehearsal


@dataclass(frozen=True)
class Work:
    """What a rank does in a step besides the exchange; of the slowest rank."""

    seconds: float
    overlapping: float
    """Of them, those of the backward pass during which gradients may travel; 0 if they are sent after it."""


@dataclass(frozen=True)
class Link:
    """What carries the exchange."""

    ranks: int
    round_seconds: float
    """From the submission of an all-reduce of a few bytes to its result."""
    hop_seconds: float
    """A message of a few bytes within a collective."""
    rates: Mapping[Kind, float]
    """Bytes a second that a rank sends in large collectives."""
    overlap: float = 1.0
    """Of an exchange and a computation of the same length, the part of the exchange that the computation hides."""

    @classmethod
    def uniform(cls, *, ranks: int, rate: float, latency: float) -> Link:
        """A link that sends `rate` bytes a second, in rounds of `latency` seconds; messages are free."""
        return cls(ranks, latency, 0.0, dict.fromkeys(Kind, rate))

    def at(self, *, ranks: int | None = None, rate: float | None = None) -> Link:
        """This link with another number of ranks, or with `rate` bytes a second in every collective."""
        moved = self
        if ranks is not None:
            latency = self.fixed_seconds + self.hop_seconds * messages(Kind.ALL_REDUCE, ranks)
            moved = dataclasses.replace(moved, ranks=ranks, round_seconds=latency)
        return moved if rate is None else dataclasses.replace(moved, rates=dict.fromkeys(Kind, rate))

    @property
    def highest_rate(self) -> float:
        """That of the kind of collective in which ranks send fastest."""
        return max(self.rates.values())

    @property
    def fixed_seconds(self) -> float:
        """Of a round, what does not depend on the number of ranks: mostly Horovod's cycle."""
        return max(0.0, self.round_seconds - self.hop_seconds * messages(Kind.ALL_REDUCE, self.ranks))


@dataclass(frozen=True)
class Prediction:
    """A step under one scheme; seconds."""

    seconds: float
    coding: float
    wire: float
    """Latency and bytes of the exchange."""
    hidden: float
    """Of `wire`, what goes on while backward computes."""
    bytes_sent: int


def messages(kind: Kind, ranks: int) -> float:
    """Messages of a collective that follow one another."""
    if kind is Kind.ALL_TO_ALL:
        return ranks - 1
    return math.log2(ranks) * (1 if kind is Kind.ALL_GATHER else 2)


def predict(work: Work, link: Link, exchange: Rehearsal) -> Prediction:
    """A step of `work` with `exchange`, which was rehearsed for as many ranks as `link` has."""
    early = _transfer(link, (operation for operation in exchange.operations if not operation.late))
    wire = latency(link, exchange.operations) + _transfer(link, exchange.operations)
    hidden = link.overlap * min(early, work.overlapping)
    seconds = work.seconds + exchange.coding_seconds + wire - hidden
    return Prediction(seconds, exchange.coding_seconds, wire, hidden, exchange.bytes_sent)


def latency(link: Link, operations: Iterable[Operation]) -> float:
    """Seconds that `operations` would take if bytes took no time."""
    rounds: dict[int, list[Kind]] = {}
    for operation in operations:
        kinds = rounds.setdefault(operation.round, [])
        if operation.kind is Kind.ALL_TO_ALL or operation.kind not in kinds:
            kinds.append(operation.kind)
    hops = sum(messages(kind, link.ranks) for kinds in rounds.values() for kind in kinds)
    return len(rounds) * link.fixed_seconds + link.hop_seconds * hops


def break_even(work: Work, link: Link, dense: Rehearsal, other: Rehearsal) -> float:
    """Bytes a second from which on `dense` is at least as fast as `other`, with the latencies of `link`.

    Infinite if `other` is faster however high the rate, 0 if it is at none.
    """

    def gap(inverse: float) -> float:
        """How much longer dense takes where a byte takes `inverse` seconds."""
        return _at(work, link, dense, inverse) - _at(work, link, other, inverse)

    # Seconds are linear in `inverse` between the points where the backward pass is filled.
    points = sorted({0.0, *(point for exchange in (dense, other) if (point := _filled(work, exchange)) < math.inf)})
    if gap(0.0) > 0:
        return math.inf
    for low, high in zip(points, [*points[1:], 2 * points[-1] + 1], strict=True):
        if gap(high) > 0:
            inverse = low + (high - low) * -gap(low) / (gap(high) - gap(low))
            return 1 / inverse if inverse > 0 else math.inf
    return 0.0


def _at(work: Work, link: Link, exchange: Rehearsal, inverse: float) -> float:
    early = sum(operation.bytes_sent for operation in exchange.operations if not operation.late)
    total = sum(operation.bytes_sent for operation in exchange.operations)
    hidden = link.overlap * min(early * inverse, work.overlapping)
    return exchange.coding_seconds + latency(link, exchange.operations) + total * inverse - hidden


def _filled(work: Work, exchange: Rehearsal) -> float:
    """Seconds a byte at which what may travel during backward takes just as long."""
    early = sum(operation.bytes_sent for operation in exchange.operations if not operation.late)
    return work.overlapping / early if early else math.inf


def _transfer(link: Link, operations: Iterable[Operation]) -> float:
    return sum(operation.bytes_sent / link.rates[operation.kind] for operation in operations)
