"""What a plan will do, foreseen without training: how evenly replicas are loaded, and what padding would have cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hvd_novel.sharding import dealing
from hvd_novel.sharding.plan import Plan


@dataclass(frozen=True)
class Forecast:
    """Some steps of a plan."""

    tokens: np.ndarray
    """Tokens of each step over all replicas, int64 [steps]."""
    loads: np.ndarray
    """What the packs of each replica cost, float64 [steps, replicas]."""
    packs: np.ndarray
    """How many they are, int64 [steps, replicas]."""
    costliest: np.ndarray
    """What the costliest span of each step costs, float64 [steps]."""
    least: np.ndarray
    """What the busiest replica must cost at least, however spans are dealt, float64 [steps]; see `least_makespan`."""

    @cached_property
    def utilisation(self) -> np.ndarray:
        """The part of a step that replicas are busy, on average over them, float64 [steps]."""
        return self.loads.mean(axis=1) / self.loads.max(axis=1)

    @cached_property
    def bound(self) -> np.ndarray:
        """The costliest span of each step / the mean cost of a replica: above 1 no deal is even, float64 [steps]."""
        return self.costliest / self.loads.mean(axis=1)

    @cached_property
    def limit(self) -> np.ndarray:
        """The utilisation that no deal exceeds, float64 [steps]."""
        return self.loads.mean(axis=1) / self.least

    @property
    def throughput(self) -> float:
        """Work done / work that could have been done while steps lasted, over all steps."""
        return float(self.loads.mean(axis=1).sum() / self.loads.max(axis=1).sum())


def forecast(plan: Plan, caps: Sequence[int], steps: Iterable[int]) -> Forecast:
    """What `plan` makes of `steps` for replicas with packs of at most `caps` tokens."""
    tokens, loads, packs, costliest, least = [], [], [], [], []
    for step in steps:
        planned = plan.step(step, caps)
        costs = np.sort(plan.cost.of(_spans(plan, step, caps)))[::-1]
        tokens.append(planned.tokens)
        loads.append([sum(of_replica) for of_replica in planned.costs])
        packs.append([len(of_replica) for of_replica in planned.costs])
        costliest.append(costs[0])
        least.append(least_makespan(costs, len(caps)))
    return Forecast(
        tokens=np.array(tokens, np.int64),
        loads=np.array(loads, np.float64),
        packs=np.array(packs, np.int64),
        costliest=np.array(costliest),
        least=np.array(least),
    )


def least_makespan(costs: np.ndarray, replicas: int) -> float:
    """A lower bound of the largest load when `costs`, descending, are dealt to `replicas`.

    The mean; and of the k * replicas + 1 largest some replica gets k + 1, which are not less than the smallest k + 1.
    """
    sums = np.concatenate([[0.0], costs.cumsum()])
    k = np.arange((len(costs) - 1) // replicas + 1)
    last = k * replicas + 1
    return float(max(sums[-1] / replicas, (sums[last] - sums[last - k - 1]).max()))


def _spans(plan: Plan, step: int, caps: Sequence[int]) -> np.ndarray:
    """Tokens of the spans of a step, documents in the order of the epoch, int32 [spans]."""
    documents = plan.documents(step, len(caps))
    _, start, stop, turn = dealing.cut(documents, plan.lengths, plan.longest_span(step, caps))
    return (stop - start)[np.argsort(turn, kind="stable")]


@dataclass(frozen=True)
class Padding:
    """Samples in batches of equally many, one batch after another, each padded to its longest sample."""

    batch: int
    """Samples in a batch: as many as fill a pack on average."""
    share: float
    """Of all tokens computed, those that are padding."""
    largest: int
    """Tokens of the largest batch, padding included."""


def padding(plan: Plan, caps: Sequence[int], steps: Iterable[int]) -> Padding:
    """What padding would make of `steps`, with samples in their random order and cut as packs need them."""
    lengths = np.concatenate([_spans(plan, step, caps) for step in steps])
    batch = max(1, round(min(caps) / float(lengths.mean())))
    sizes = padded(lengths, batch)
    return Padding(batch, 1 - float(lengths.sum(dtype=np.int64)) / int(sizes.sum()), int(sizes.max()))


def padded(lengths: np.ndarray, batch: int) -> np.ndarray:
    """Tokens of each batch, int64 [batches], when `batch` of `lengths` at a time are padded to their longest."""
    starts = np.arange(0, len(lengths), batch)
    counts = np.diff(starts, append=len(lengths))
    return np.maximum.reduceat(lengths, starts).astype(np.int64) * counts
