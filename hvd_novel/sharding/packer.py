"""From the documents of a step to packs: cut, dealt to replicas, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numba
import numpy as np

from hvd_novel.sharding import bins, dealing
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.spans import Span

_MANNERS = {"random": dealing.IN_TURN, "greedy": dealing.BY_OWNER}
_NO_OWNERS = np.empty(0, np.int32)


class Dealt(Sequence[list[list[Span]]]):
    """The packs of each replica, all spans as columns; a replica's are listed when it asks for them.

    `columns` int32 [3, spans] are document, start and stop; `packs` int64 [packs + 1] says where each pack begins, and
    `replicas` int64 [replicas + 1] with which pack each replica.
    """

    def __init__(self, columns: np.ndarray, packs: np.ndarray, replicas: np.ndarray) -> None:
        self._columns, self._packs, self._replicas = self._arrays = (columns, packs, replicas)

    def __len__(self) -> int:
        return len(self._replicas) - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dealt) and all(map(np.array_equal, self._arrays, other._arrays))

    def __getitem__(self, replica: Any) -> Any:
        """The packs of one replica: a list of spans for each."""
        replica = range(len(self))[replica]
        bounds = self._packs[self._replicas[replica] : self._replicas[replica + 1] + 1].tolist()
        begin = bounds[0]
        columns = self._columns[:, begin : bounds[-1]].tolist()
        spans: list[Span] = list(map(tuple.__new__, repeat(Span), zip(*columns, strict=True)))  # twice as fast as Span
        return [spans[start - begin : stop - begin] for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Packed:
    """Spans in packs; see `StepPlan`."""

    packs: Dealt
    costs: list[list[float]]
    columns: np.ndarray
    """The same as int32 [5, spans]: replica, pack, document, start, stop."""


def pack(
    documents: np.ndarray,
    lengths: np.ndarray,
    caps: Sequence[int],
    *,
    chunk: int | None = None,
    cost: Cost = TOKENS,
    strategy: str = "cost",
    owners: np.ndarray | None = None,
) -> Packed:
    """Cut `documents` into spans of at most `chunk` tokens (the smallest cap), deal and pack them.

    `lengths` are those of all documents, `caps` the most tokens in a pack of each replica; `strategy` and `owners`
    see `strategies`. The result depends on the order of `documents` for the strategy `random` alone.
    """
    smallest = min(caps)
    columns, packs, replicas, sums = _packed(
        documents,
        lengths,
        min(chunk or smallest, smallest),
        (cost.linear, cost.quadratic, cost.span),
        strategy == "token",
        _MANNERS.get(strategy, dealing.BY_WEIGHT),
        _NO_OWNERS if owners is None else owners,
        np.array(caps, np.int64),
    )
    costs = sums.tolist()
    return Packed(
        packs=Dealt(columns[2:], packs, replicas),
        costs=[costs[first:last] for first, last in pairwise(replicas.tolist())],
        columns=columns,
    )


@numba.njit(cache=True, nogil=True)
def _packed(
    documents: np.ndarray,
    lengths: np.ndarray,
    chunk: int,
    cost: tuple[float, float, float],
    by_tokens: bool,
    manner: int,
    owners: np.ndarray,
    capacities: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(`Packed.columns`, where packs and replicas begin as `Dealt` has them, the cost of each pack, float64).

    One compiled call for a step: a corpus of short documents has more than ten thousand steps in an epoch.
    """
    spans = dealing.cut(documents, lengths, chunk)
    sizes = spans[2] - spans[1]
    tokens = sizes.astype(np.float64)
    costs = tokens * cost[0] + tokens * tokens * cost[1] + cost[2]
    owner = dealing.deal(spans, tokens if by_tokens else costs, len(capacities), manner, owners)
    items, number, packs, replicas = bins.packed(owner, sizes, capacities)
    columns = np.empty((5, len(items)), np.int32)
    columns[0] = owner[items]
    columns[1] = number
    sums = np.zeros(len(packs) - 1)
    for pack in range(len(sums)):
        for i in range(packs[pack], packs[pack + 1]):
            sums[pack] += costs[items[i]]
    for row in range(3):
        columns[2 + row] = spans[row][items]
    return columns, packs, replicas, sums
