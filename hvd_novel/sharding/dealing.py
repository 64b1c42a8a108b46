"""Compiled loops over the documents of a step: cutting them into spans, dealing those to replicas.

Deterministic, as those of `kernels`.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True)
BY_WEIGHT, IN_TURN, BY_OWNER = range(3)


@_compiled
def cut(documents: np.ndarray, lengths: np.ndarray, chunk: int) -> np.ndarray:
    """Cut documents into spans of `chunk` tokens and a shorter rest, longest first, equal ones by document.

    Returns int32 [4, spans]: document, start, stop, and where the document stands in `documents`. Documents without
    tokens have no span.
    """
    count = 0
    for document in documents:
        count += -(-lengths[document] // chunk)
    spans = np.empty((4, count), np.int32)
    keys = np.empty(count, np.int64)
    at = 0
    for turn in range(len(documents)):
        document = documents[turn]
        length = lengths[document]
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            spans[0, at], spans[1, at], spans[2, at], spans[3, at] = document, start, stop, turn
            keys[at] = np.int64(start - stop) << 32 | document
            at += 1
    order = np.argsort(keys, kind="mergesort")  # stable: equal spans of a document stay in its order
    for row in range(4):
        spans[row] = spans[row][order]
    return spans


@_compiled
def deal(spans: np.ndarray, weights: np.ndarray, replicas: int, manner: int, owners: np.ndarray) -> np.ndarray:
    """The replica of each of `spans`, int32, see `cut`.

    BY_WEIGHT evens out the sums of `weights`, float64 [spans]; IN_TURN gives one document after another to the next
    replica; BY_OWNER takes each document's of `owners`, int32.
    """
    if manner == IN_TURN:
        return (spans[3] % replicas).astype(np.int32)
    if manner == BY_OWNER:
        return owners[spans[0]]
    dealt = longest_processing_time(weights, replicas)
    even_out(weights, dealt, replicas)
    return dealt


@_compiled
def longest_processing_time(weights: np.ndarray, replicas: int) -> np.ndarray:
    """Deal items, heaviest first, each to the least loaded replica (Graham 1969); returns int32 [items]."""
    owners = np.empty(len(weights), np.int32)
    loads = [(0.0, replica) for replica in range(replicas)]
    for i in range(len(weights)):
        load, replica = loads[0]
        owners[i] = replica
        heapq.heapreplace(loads, (load + weights[i], replica))
    return owners


@_compiled
def even_out(weights: np.ndarray, owners: np.ndarray, replicas: int) -> None:
    """Improve `owners` by exchange: the most loaded replica gives an item away, or swaps it for a lighter one.

    Each time the exchange that lowers the larger load of the two most; ends at 0.2 % above the mean, or when none
    does. Dealing alone leaves several per cent where replicas have few items each, none of them small.
    """
    loads = np.zeros(replicas)
    for i in range(len(weights)):
        loads[owners[i]] += weights[i]
    enough = loads.mean() * 1.002
    for _ in range(4 * replicas):
        fullest, emptiest = loads.argmax(), loads.argmin()
        best, give, take = loads[fullest] * (1 - 1e-6), -1, -1
        if loads[fullest] <= enough:
            return
        for i in range(len(weights)):
            if owners[i] != fullest:
                continue
            after = max(loads[fullest] - weights[i], loads[emptiest] + weights[i])
            if after < best:
                best, give, take = after, i, -1
            for j in range(i + 1, len(weights)):
                difference = weights[i] - weights[j]
                after = max(loads[fullest] - difference, loads[owners[j]] + difference)
                if after < best and owners[j] != fullest:
                    best, give, take = after, i, j
        if give < 0:
            return
        other, difference = (emptiest, weights[give]) if take < 0 else (owners[take], weights[give] - weights[take])
        owners[give] = other
        if take >= 0:
            owners[take] = fullest
        loads[fullest] -= difference
        loads[other] += difference
