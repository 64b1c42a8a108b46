"""How the spans of a step go to replicas.

cost     longest processing time on modelled cost, then exchanges between replicas (the default): equal cost on every
         replica in every step
token    the same on tokens
random   documents one after another in the epoch's random order, each to the next replica: what a plain
         distributed sampler does
greedy   the sampler of load-aware articles: over the whole epoch each document to the replica with the fewest tokens
         so far, longest first; each replica then consumes its own documents in random order
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_novel.sharding import kernels

STRATEGIES = ("cost", "token", "random", "greedy")


@dataclass(frozen=True)
class Spans:
    """The spans of a step as columns, int32 [spans] each, longest first; equal ones by document."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    turn: np.ndarray
    """Where the document stands in the order given."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each span."""
        return self.stop - self.start


def cut(documents: np.ndarray, lengths: np.ndarray, chunk: int) -> Spans:
    """The spans, of at most `chunk` tokens, of `documents`; `lengths` are those of all documents."""
    turn, start, stop = kernels.cut(documents, lengths, chunk)
    document = documents[turn].astype(np.int32)
    order = np.argsort((start - stop).astype(np.int64) << 32 | document, kind="stable")
    return Spans(document[order], start[order], stop[order], turn[order])


def deal(spans: Spans, costs: np.ndarray, replicas: int, strategy: str, owners: np.ndarray | None) -> np.ndarray:
    """The replica of each span, int32; `owners` are what `greedy_owners` gave, for that strategy."""
    if strategy == "random":
        return spans.turn % replicas
    if strategy == "greedy":
        assert owners is not None
        return owners[spans.document]
    weights = costs if strategy == "cost" else spans.lengths.astype(np.float64)
    owner = kernels.longest_processing_time(weights, replicas)
    kernels.even_out(weights, owner, replicas)
    return owner


def greedy_owners(lengths: np.ndarray, replicas: int) -> np.ndarray:
    """The replica of each document, int32, for the strategy `greedy`."""
    longest_first = np.argsort(-lengths, kind="stable")
    owners = np.empty(len(lengths), np.int32)
    owners[longest_first] = kernels.longest_processing_time(lengths[longest_first].astype(np.float64), replicas)
    return owners


def consumed_together(order: np.ndarray, lengths: np.ndarray, owners: np.ndarray, replicas: int) -> None:
    """Rearrange `order` so that replicas come through their own documents, each in its order, at an equal pace."""
    progress = kernels.progress(order, lengths, owners, replicas)
    order[:] = order[np.argsort(progress, kind="stable")]
