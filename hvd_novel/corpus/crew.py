"""Who prepares a corpus: one process, or the ranks of a job that share its work.

Work is a list of tasks that every rank knows; each rank has a queue of its own and, when that is empty, takes from
the others'. What is taken is a number, never text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Crew(Protocol):
    """The processes that prepare a corpus together. All of them make the same calls in the same order."""

    rank: int
    size: int

    def do(self, name: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; the results in rank order. A UserError of one rank is raised on all."""

    def claim(self, sizes: Sequence[int], owners: Sequence[int]) -> Iterator[int]:
        """The indices of the tasks that fall to this rank, each claimed when it is drawn; every task goes to one rank.

        `sizes` says how much work each task is, `owners` in which rank's queue it stands. To be drawn to the end.
        """


class Alone:
    """A single process: it does everything, in order."""

    rank, size = 0, 1

    def do(self, name: str, action: Callable[[], T]) -> list[T]:
        """See `Crew.do`."""
        return [action()]

    def claim(self, sizes: Sequence[int], owners: Sequence[int]) -> Iterator[int]:
        """See `Crew.claim`."""
        return iter(range(len(sizes)))


class Queues:
    """A rank's view of the queues of all ranks; `draw` gives the next integer of a queue, to all ranks together."""

    def __init__(self, draw: Callable[[int], int], rank: int, size: int) -> None:
        self._draw, self._rank, self._size = draw, rank, size
        self._drawn = [0] * size

    def claim(self, sizes: Sequence[int], owners: Sequence[int], stopped: Callable[[], bool]) -> Iterator[int]:
        """See `Crew.claim`; ends early when `stopped`, after which the queues cannot be used again.

        The largest tasks of a queue come first, so that what is left for the end is small.
        """
        tasks: list[list[int]] = [[] for _ in range(self._size)]
        for task in _largest_first(sizes):
            tasks[owners[task]].append(task)
        own_first = [(self._rank + turn) % self._size for turn in range(self._size)]
        for queue in own_first:
            while not stopped():
                place = self._draw(queue) - self._drawn[queue]
                if place >= len(tasks[queue]):
                    break
                yield tasks[queue][place]
        for queue in own_first:  # every rank has drawn once in vain from each
            self._drawn[queue] += len(tasks[queue]) + self._size


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """An owner for each task, in turn from the largest task to the smallest."""
    owners = [0] * len(sizes)
    for turn, task in enumerate(_largest_first(sizes)):
        owners[task] = turn % ranks
    return owners


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda task: -sizes[task])
