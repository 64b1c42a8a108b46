"""Packs of a step taken by whichever rank is free, simulated: what stealing can gain over dealing.

The time that a pack takes is its modelled cost, times how slow its rank is in that step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

WAYS = {"dealt at random": "random", "pulled at random": "random", "dealt by cost": "cost", "longest first": "cost"}
"""How packs reach ranks, and the strategy that made them: as dealt, or one list for all, in random order or the
costliest first."""
_SPREAD = 0.05

Costs = Sequence[Sequence[Sequence[float]]]
"""Costs of packs: [steps][ranks][packs]."""


def busy(costs: Costs, way: str, *, slow: float) -> float:
    """The part of a step that ranks are busy, on average over ranks and steps, in one of WAYS.

    Speeds of ranks vary by 5 % from step to step; the first rank takes `slow` times as long beside that.
    """
    generator = np.random.default_rng(3)
    shares = []
    for step in costs:
        slowness = generator.lognormal(0.0, _SPREAD, len(step))
        slowness[0] *= slow
        ends = _dealt(step, slowness) if way.startswith("dealt") else _pulled(_queue(step, way, generator), slowness)
        shares.append(ends.mean() / ends.max())
    return float(np.mean(shares))


def _dealt(step: Sequence[Sequence[float]], slowness: np.ndarray) -> np.ndarray:
    return np.array([sum(packs) for packs in step]) * slowness


def _queue(step: Sequence[Sequence[float]], way: str, generator: np.random.Generator) -> np.ndarray:
    queue = np.array([cost for packs in step for cost in packs])
    return generator.permutation(queue) if way == "pulled at random" else np.sort(queue)[::-1]


def _pulled(queue: np.ndarray, slowness: np.ndarray) -> np.ndarray:
    """When each rank ends, if each takes the next pack of `queue` as soon as it is free."""
    free = [(0.0, rank) for rank in range(len(slowness))]
    for cost in queue.tolist():
        end, rank = free[0]
        heapq.heapreplace(free, (end + cost * slowness[rank], rank))
    return np.array([end for end, _ in free])
