"""Work drawn from queues: every task once, one's own first, in any interleaving of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from hvd_novel.corpus.crew import Queues, deal

TASKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20)


class Cells:
    """The shared counter, in one process."""

    def __init__(self) -> None:
        self.next = Counter[int]()

    def draw(self, cell: int) -> int:
        self.next[cell] += 1
        return self.next[cell] - 1


@given(st.lists(TASKS, min_size=1, max_size=3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_task_goes_to_one_rank(rounds: list[list[tuple[int, int]]], ranks: int, random) -> None:  # type: ignore[no-untyped-def]
    cells = Cells()
    crew = [Queues(cells.draw, rank, ranks) for rank in range(ranks)]
    for tasks in rounds:
        sizes, owners = [size for size, _ in tasks], [owner % ranks for _, owner in tasks]
        claims: dict[int, Iterator[int]] = {
            rank: queues.claim(sizes, owners, lambda: False) for rank, queues in enumerate(crew)
        }
        claimed: list[list[int]] = [[] for _ in crew]
        while claims:
            rank = random.choice(sorted(claims))
            task = next(claims[rank], None)
            if task is None:
                del claims[rank]
            else:
                claimed[rank].append(task)
        assert sorted(task for mine in claimed for task in mine) == list(range(len(tasks)))
        for rank, mine in enumerate(claimed):
            stolen = [owners[task] != rank for task in mine]
            assert stolen == sorted(stolen), "one's own come first"
            own = [sizes[task] for task in mine if owners[task] == rank]
            assert own == sorted(own, reverse=True), "the largest come first"


def test_a_rank_that_is_alone_at_work_takes_everything() -> None:
    cells = Cells()
    crew = [Queues(cells.draw, rank, 2) for rank in range(2)]
    assert list(crew[1].claim([1, 2, 3, 4], [0, 0, 0, 1], lambda: False)) == [3, 2, 1, 0]
    assert list(crew[0].claim([1, 2, 3, 4], [0, 0, 0, 1], lambda: False)) == []


def test_nothing_is_drawn_after_a_failure() -> None:
    cells, stopped = Cells(), [False]
    claims = Queues(cells.draw, 0, 2).claim([1, 2, 3], [0, 0, 1], lambda: stopped[0])
    assert next(claims) == 1
    stopped[0] = True
    assert list(claims) == []


def test_tasks_are_dealt_from_the_largest_to_the_smallest() -> None:
    assert deal([1, 9, 5, 7], 2) == [1, 0, 0, 1]
    assert deal([], 3) == []
