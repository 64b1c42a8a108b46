"""The ranks of a job as a crew; apart from `crew` because importing `comm` imports Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hvd_novel import comm
from hvd_novel.corpus.crew import queues

T = TypeVar("T")


class Ranks:
    """All ranks of the job that a launcher started; making it starts Horovod. See `crew.Crew`."""

    def __init__(self) -> None:
        topology = comm.init(deterministic=False)
        self.rank, self.size = topology.rank, topology.size
        # Ranks of one host share its cores: without this the tokenizer of each would take them all.
        threads = max(1, len(os.sched_getaffinity(0)) // topology.local_size)
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        self._counter = comm.shared_counter("prepare.queues", cells=self.size)
        self._drawn = [0] * self.size
        self.how = f"{self.size} ranks ({comm.controller()}); work is drawn by {self._counter.how}"

    def do(self, name: str, action: Callable[[], T]) -> list[T]:
        """See `Crew.do`."""
        return comm.in_parallel(action, f"prepare.{name}")

    def claim(self, sizes: Sequence[int], owners: Sequence[int]) -> Iterator[int]:
        """See `Crew.claim`."""
        own_first = [(self.rank + turn) % self.size for turn in range(self.size)]
        tasks = queues(sizes, owners, self.size)
        for queue in own_first:
            while (place := self._counter.next(queue) - self._drawn[queue]) < len(tasks[queue]):
                yield tasks[queue][place]
        for queue in own_first:  # every rank has drawn once in vain from each
            self._drawn[queue] += len(tasks[queue]) + self.size
