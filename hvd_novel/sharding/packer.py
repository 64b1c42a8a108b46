"""From the documents of a step to packs: cut, dealt to replicas, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from hvd_novel.sharding import bins
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.strategies import cut, deal


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
        first, last = self._replicas[range(len(self))[replica] :][:2]
        bounds = self._packs[first : last + 1]
        columns = self._columns[:, bounds[0] : bounds[-1]].tolist()
        spans: list[Span] = list(map(tuple.__new__, repeat(Span), zip(*columns, strict=True)))  # twice as fast as Span
        return [spans[start:stop] for start, stop in pairwise((bounds - bounds[0]).tolist())]


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
    spans = cut(documents, lengths, min(chunk or min(caps), min(caps)))
    costs = cost.of(spans.lengths)
    owner = deal(spans, costs, len(caps), strategy, owners)
    items, number, packs, replicas = bins.packed(owner, spans.lengths, np.array(caps, np.int64))
    columns = np.stack([owner[items], number, spans.document[items], spans.start[items], spans.stop[items]])
    sums = np.add.reduceat(costs[items], packs[:-1]).tolist() if len(items) else []
    return Packed(
        packs=Dealt(columns[2:], packs, replicas),
        costs=[sums[first:last] for first, last in pairwise(replicas.tolist())],
        columns=columns,
    )
