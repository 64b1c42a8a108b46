"""The steps of preparing, as a crew does them: by rank 0 alone, or shared out; timed, and failing as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hvd_novel.corpus.crew import Crew
from hvd_novel.corpus.writer import writing

T = TypeVar("T")


class Work:
    """Steps towards the store `out`. A UserError, or an OSError about scratch files, of one rank ends all ranks."""

    def __init__(self, crew: Crew, out: Path, progress: Callable[[str], None]) -> None:
        self._crew, self._out = crew, out
        self.rank, self.size = crew.rank, crew.size
        self.progress = progress
        self._seconds: dict[str, tuple[float, float]] = {}  # on the clock, and of processor time

    def each(self, name: str, action: Callable[[], T]) -> list[T]:
        """Every rank runs `action`; the results in rank order."""
        start, busy = time.perf_counter(), time.process_time()
        results = self._crew.do(name, lambda: self._guarded(action))
        self._seconds[name] = time.perf_counter() - start, time.process_time() - busy
        return results

    def lead(self, name: str, action: Callable[[], T]) -> T:
        """Rank 0 runs `action`; all ranks get the result."""
        return self.each(name, lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def share(
        self,
        name: str,
        sizes: Sequence[int],
        owners: Sequence[int],
        action: Callable[[Iterator[int]], Mapping[int, T]],
    ) -> list[T]:
        """The results of tasks, in their order; `action` does those it draws, see `Crew.claim`."""
        parts = self.each(name, lambda: action(self._crew.claim(sizes, owners)))
        results = {task: result for part in parts for task, result in part.items()}
        return [results[task] for task in range(len(sizes))]

    def say_seconds(self) -> None:
        """One line from rank 0: how long each step took, waiting included, and its processor time."""
        ranks = self._crew.do("seconds", lambda: self._seconds)
        busy = {name: sum(rank[name][1] for rank in ranks) for name in self._seconds}
        steps = [f"{name} {seconds:.2f} ({busy[name]:.2f})" for name, (seconds, _) in self._seconds.items()]
        if self.rank == 0:
            self.progress(f"seconds (processor time of all ranks): {', '.join(steps)}")

    def _guarded(self, action: Callable[[], T]) -> T:
        with writing(self._out):
            return action()
