"""The random order of an epoch: any step of it is found at once, or all of it is laid out.

Documents stand in the order of a random key, a bijection of their numbers. So the documents of one step are those
whose keys lie in a range, and two passes over the lengths find them without an order in memory: a run resumed in the
middle of a huge corpus need not shuffle it first. For the steps after it, the order is laid out once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_novel.sharding import kernels

_DOCUMENTS_IN_BUCKET = 64
_MOST_BITS = 16


class KeyOrder:
    """Documents by key, cut into `steps` of equal tokens, each document counted as at most `most`; `total` in all.

    `lengths` are int32 [documents]. Beside them it needs 16 bytes for each of at most 65,536 buckets of keys, and 2 for
    each document until it is settled.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, most: int, steps: int, total: int) -> None:
        self._lengths, self._most, self._steps, self._total = lengths, most, steps, total
        bits = min(_MOST_BITS, (len(lengths) // _DOCUMENTS_IN_BUCKET).bit_length())
        self._key = (np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32))
        self._buckets, self._tokens, self._documents = kernels.weigh_buckets(
            lengths, most, *self._key, 32 - bits, 1 << bits
        )
        self._grouped: np.ndarray | None = None

    def documents(self, index: int) -> np.ndarray:
        """The documents of step `index` of the epoch, in its order, int32."""
        first, last, before, after, until = kernels.buckets_of_step(self._tokens, index, self._steps, self._total)
        begin, end = self._documents[first], self._documents[last + 1]
        buckets = self._buckets  # before the question: another thread may settle meanwhile
        if self._grouped is None:
            found = kernels.in_buckets(buckets, first, last, end - begin)
        else:
            found = self._grouped[begin:end]
        return kernels.in_key_order(found, self._lengths, self._most, *self._key, before, after, until)

    def settle(self, fill: Callable[[Callable[[np.ndarray], None]], np.ndarray]) -> None:
        """Lay the documents out by bucket, in memory that `fill` lets be written to: further steps take no pass."""
        if self._grouped is None:
            self._grouped = fill(self._group)
            self._buckets = self._buckets[:0]

    def write(self, order: np.ndarray) -> None:
        """Write all documents in order to `order`, int32 [documents]."""
        self._group(order)
        kernels.sort_buckets(order, *self._key, self._documents)

    def _group(self, order: np.ndarray) -> None:
        kernels.group(order, self._buckets, self._documents.copy())
