"""From the documents of a step to packs: cut, dealt to replicas, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np

from hvd_novel.sharding import kernels
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.strategies import cut, deal


@dataclass(frozen=True)
class Packed:
    """Spans in packs; see `StepPlan`."""

    packs: list[list[list[Span]]]
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
    grouped = np.argsort(owner, kind="stable")  # each replica's spans together, still longest first
    starts = np.searchsorted(owner[grouped], np.arange(len(caps) + 1))
    number = np.empty(len(owner), np.int32)
    number[grouped] = kernels.best_fit_decreasing(spans.lengths[grouped], starts, np.array(caps, np.int64))
    order = np.argsort(owner.astype(np.int64) << 32 | number, kind="stable")
    columns = np.stack([column[order] for column in (owner, number, spans.document, spans.start, spans.stop)])
    return _listed(columns, costs[order], len(caps))


def _listed(columns: np.ndarray, costs: np.ndarray, replicas: int) -> Packed:
    owner, number = columns[:2]
    changes = (np.diff(owner) != 0) | (np.diff(number) != 0)
    bounds = np.flatnonzero(np.concatenate([[True], changes, [True]])) if len(owner) else np.zeros(1, np.int64)
    triples = zip(*(column.tolist() for column in columns[2:]), strict=True)
    spans: list[Span] = list(map(tuple.__new__, repeat(Span), triples))  # twice as fast as calling Span
    packs = [spans[first:last] for first, last in pairwise(bounds.tolist())]
    sums = np.add.reduceat(costs, bounds[:-1]).tolist() if packs else []
    of_replica = np.searchsorted(owner[bounds[:-1]], np.arange(replicas + 1)).tolist()
    return Packed(
        packs=[packs[first:last] for first, last in pairwise(of_replica)],
        costs=[sums[first:last] for first, last in pairwise(of_replica)],
        columns=columns,
    )
