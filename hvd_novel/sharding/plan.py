"""The plan: which documents form a step, and how they are dealt to replicas and packed.

A pure function of (lengths, seed, step, token budget, caps, number of replicas): resuming needs nothing but
the step, and at another number of replicas the same documents form the same step.

Two levels. A step takes the next contiguous slice of the epoch's shuffled order. Inside it documents go to
replicas longest first, each to the least loaded; inside a replica best-fit-decreasing makes packs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_novel.errors import UserError

Packs = list[list[int]]


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step trains."""

    epoch: int
    packs: list[Packs]
    """packs[replica][i]: the documents of that replica's i-th pack; a replica may have none."""
    costs: list[list[float]]
    """costs[replica][i]: what that pack costs, in tokens."""
    tokens: int
    """All tokens of the step, over all replicas."""
    trained_tokens: int
    """Labels trained in this step over all replicas: the divisor of its loss."""

    @property
    def documents(self) -> list[int]:
        """All documents of the step, in ascending order."""
        return sorted(document for packs in self.packs for pack in packs for document in pack)


class Plan:
    """Steps over a split of a token store; every document is trained once in each epoch.

    `lengths` and `trained` are int arrays [documents]: tokens, and tokens whose labels are trained. A step holds
    about `step_tokens` tokens (all steps of an epoch are equally large to within one document). Raises UserError if
    there are no documents.
    """

    def __init__(self, lengths: np.ndarray, trained: np.ndarray, *, seed: int, step_tokens: int) -> None:
        if len(lengths) == 0:
            raise UserError("the token store has no training samples; prepare a larger corpus")
        self.lengths, self.trained, self.seed = lengths, trained, seed
        total, longest = int(lengths.sum(dtype=np.int64)), int(lengths.max())
        self._longest = longest
        # A slice not shorter than the longest document holds the end of at least one: no step is empty.
        self.steps_per_epoch = max(1, min(-(-total // step_tokens), total // longest))
        self._total = total
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self._bounds = np.empty(0, np.int64)

    def step(self, step: int, caps: Sequence[int]) -> StepPlan:
        """The plan of optimizer step `step` (from 0) for ``len(caps)`` replicas with packs of at most `caps` tokens.

        Raises ValueError if a document is longer than a cap.
        """
        if min(caps) < self._longest:
            raise ValueError(f"a document of {self._longest} tokens does not fit into packs of {min(caps)}")
        epoch, index = divmod(step, self.steps_per_epoch)
        self._enter(epoch)
        documents = self._order[self._bounds[index] : self._bounds[index + 1]]
        dealt = deal(documents, self.lengths, len(caps))
        packs = [pack(mine, self.lengths, cap) for mine, cap in zip(dealt, caps, strict=True)]
        return StepPlan(
            epoch=epoch,
            packs=packs,
            costs=[[float(self.lengths[documents].sum()) for documents in mine] for mine in packs],
            tokens=int(self.lengths[documents].sum(dtype=np.int64)),
            trained_tokens=int(self.trained[documents].sum(dtype=np.int64)),
        )

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        self._order = generator.permutation(len(self.lengths))
        ends = self.lengths[self._order].cumsum(dtype=np.int64)
        slices = (ends - 1) * self.steps_per_epoch // self._total  # non-decreasing: the slice each document ends in
        self._bounds = np.searchsorted(slices, np.arange(self.steps_per_epoch + 1))
        self._epoch = epoch


def check_pack_size(lengths: np.ndarray, pack_tokens: int) -> None:
    """Raise UserError if the longest document does not fit into a pack."""
    longest = int(lengths.max(initial=0))
    if longest > pack_tokens:
        raise UserError(
            f"batch.micro_batch_tokens={pack_tokens} is smaller than the longest sample of the token store "
            f"({longest} tokens); raise it, or prepare with --max-len {pack_tokens}"
        )


def deal(documents: np.ndarray, lengths: np.ndarray, replicas: int) -> Packs:
    """Deal `documents` to `replicas`: longest first, each to the one with the fewest tokens so far."""
    dealt: Packs = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    for document in _longest_first(documents, lengths):
        load, replica = heapq.heappop(loads)
        dealt[replica].append(document)
        heapq.heappush(loads, (load + int(lengths[document]), replica))
    return dealt


def pack(documents: list[int], lengths: np.ndarray, capacity: int) -> Packs:
    """Best-fit decreasing: each document goes into the fullest pack that still has room for it."""
    packs: Packs = []
    free: list[tuple[int, int]] = []  # (room left, pack), ascending
    for document in _longest_first(documents, lengths):
        length = int(lengths[document])
        fit = bisect_left(free, (length, -1))
        if fit < len(free):
            room, index = free.pop(fit)
        else:
            room, index = capacity, len(packs)
            packs.append([])
        packs[index].append(document)
        insort(free, (room - length, index))
    return packs


def _longest_first(documents: np.ndarray | list[int], lengths: np.ndarray) -> list[int]:
    """Documents by falling length, equal ones by number: one order, whatever the order given."""
    return sorted((int(document) for document in documents), key=lambda d: (-int(lengths[d]), d))
