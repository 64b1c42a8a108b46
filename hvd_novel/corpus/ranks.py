"""The ranks of a job as a crew; apart from `crew` because importing `comm` imports Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TypeVar

from hvd_novel import comm
from hvd_novel.corpus.crew import Queues

T = TypeVar("T")


class Ranks:
    """All ranks of the job that a launcher started; making it starts Horovod. See `crew.Crew`."""

    def __init__(self) -> None:
        topology = comm.init(deterministic=False, seldom=True)
        self.rank, self.size = topology.rank, topology.size
        # Ranks of one host share its cores: without this the tokenizer of each would take them all.
        threads = max(1, len(os.sched_getaffinity(0)) // topology.local_size)
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        counter = comm.shared_counter("prepare.queues", cells=self.size)
        self._queues = Queues(counter.next, self.rank, self.size)
        self._failure = Event()
        self.how = f"{self.size} ranks ({comm.controller()}); work is drawn by {counter.how}"

    def do(self, name: str, action: Callable[[], T]) -> list[T]:
        """See `Crew.do`."""

        def act(failure: Event) -> T:
            self._failure = failure
            return action()

        return comm.in_parallel(act, f"prepare.{name}")

    def claim(self, sizes: Sequence[int], owners: Sequence[int]) -> Iterator[int]:
        """See `Crew.claim`; ends early when another rank has failed."""
        return self._queues.claim(sizes, owners, self._failure.is_set)
