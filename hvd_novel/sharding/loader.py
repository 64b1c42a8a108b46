"""Plans and packs made ahead, in a thread, while the step before them is computed.

The state of loading is the step and nothing else: the plan is pure, so what was made ahead and not used is forgotten
and made again. The thread keeps within an epoch and the main thread plans the first step of each, as only there
ranks may have something to agree on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from types import TracebackType

import torch

from hvd_novel.corpus.store import StoreSplit
from hvd_novel.errors import UserError
from hvd_novel.sharding.packing import Pack, collate
from hvd_novel.sharding.plan import Plan, StepPlan
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.stealing import Claims


class Loader:
    """The steps of a run for one replica, in order; whatever else is asked for is made anew.

    `ahead`: plans and packs that may wait at most. `last_step`: no step from this one on is made. `claims`: hands out
    packs within a step instead of the plan; which ones is not known beforehand, so only plans are made ahead.
    `device`: for a GPU, packs lie in page-locked memory, from where it fetches them by itself. `cores`: CPU cores that
    the thread keeps to; see `check_cores`.

    To be closed, or used in a ``with`` statement: afterwards the thread is gone.
    """

    def __init__(
        self,
        plan: Plan,
        split: StoreSplit,
        *,
        replica: int,
        last_step: int,
        ahead: int,
        device: torch.device,
        claims: Claims | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.waited = 0.0
        """Seconds that steps have waited for plans and packs so far."""
        self._plan, self._split, self._replica = plan, split, replica
        self._last_step, self._ahead, self._claims = last_step, ahead, claims
        self._device, self._cores = device, cores
        self._caps: list[int] = []
        self._next_step = -1
        self._planned: StepPlan | None = None
        self._left = 0  # packs of the present step that are still to be taken
        self._worker: _Worker | None = None

    def step(self, step: int, caps: Sequence[int]) -> StepPlan:
        """The plan of `step`; `packs` gives what this replica trains of it."""
        with self._waiting():
            return self._step(step, list(caps))

    def packs(self) -> Iterator[Pack]:
        """The packs of this replica in the step asked for last. Under `claims`, those that it could claim."""
        assert self._planned is not None, "packs() before step()"
        if self._claims is not None:
            for spans in self._claims.of(self._planned):
                with self._waiting():
                    pack = self._collate(spans)
                yield pack
        while self._left:
            self._left -= 1
            with self._waiting():
                taken = self._take()
            assert isinstance(taken, Pack)
            yield taken

    def discard(self) -> None:
        """Forget what was made ahead: to be called before anything changes that the plan depends on."""
        if self._worker is not None:
            self._worker.stop()
        self._worker, self._next_step, self._left = None, -1, 0

    def close(self) -> None:
        """End the thread."""
        self.discard()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, step: int, caps: list[int]) -> StepPlan:
        if step == self._next_step and caps == self._caps and not self._left:
            planned = self._take()
        else:
            self.discard()
            self._caps = caps
            planned = self._plan.step(step, caps)
            self._worker = _Worker(self._make(step, planned), self._ahead)
        assert isinstance(planned, StepPlan)
        self._planned, self._left = planned, len(self._ahead_of(planned))
        end = self._end_of_epoch(step)
        self._next_step = step + 1 if step + 1 < end else -1
        return planned

    def _make(self, step: int, planned: StepPlan) -> Iterator[StepPlan | Pack]:
        """The packs of the step that is planned, then plans and packs of those after it. Runs in the thread."""
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)  # of this thread alone
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else pinning would make a context on the first GPU
        yield from map(self._collate, self._ahead_of(planned))
        for later in range(step + 1, self._end_of_epoch(step)):
            planned = self._plan.step(later, self._caps)
            yield planned
            yield from map(self._collate, self._ahead_of(planned))

    def _end_of_epoch(self, step: int) -> int:
        steps = self._plan.steps_per_epoch
        return min(self._last_step, (step // steps + 1) * steps)

    def _ahead_of(self, planned: StepPlan) -> list[list[Span]]:
        return planned.packs[self._replica] if self._claims is None else []

    def _collate(self, spans: list[Span]) -> Pack:
        pack = collate(self._split, spans)
        return pack.pinned() if self._device.type == "cuda" else pack

    def _take(self) -> StepPlan | Pack:
        assert self._worker is not None
        try:
            return self._worker.take()
        except BaseException:
            self.discard()
            raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start


class _Worker:
    """A thread that takes `items` into a bounded queue."""

    def __init__(self, items: Iterator[StepPlan | Pack], room: int) -> None:
        self._queue: Queue[StepPlan | Pack | BaseException] = Queue(room)
        self._stopped = False
        # A daemon: a process that dies without closing the loader does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(items,), name="loader", daemon=True)
        self._thread.start()

    def take(self) -> StepPlan | Pack:
        """The next item. Raises what the thread raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """End the thread, at the latest after the item it is at."""
        self._stopped = True
        # It may wait for room, for one item: after that it sees that it is stopped.
        while True:
            try:
                self._queue.get_nowait()
            except Empty:
                break
        self._thread.join()

    def _run(self, items: Iterator[StepPlan | Pack]) -> None:
        try:
            for item in items:
                self._queue.put(item)
                if self._stopped:
                    return
        except BaseException as error:
            self._queue.put(error)


def check_cores(cores: Sequence[int]) -> None:
    """Raise UserError if a thread of this process cannot be kept to `cores`."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        missing = set(cores) - os.sched_getaffinity(0)  # the kernel leaves out in silence those that are not there
    except OSError:
        missing = set(cores)
    finally:
        os.sched_setaffinity(0, before)
    if missing:
        raise UserError(
            f"data.loader_cores: core {', '.join(map(str, sorted(missing)))} cannot be used here; this process may "
            f"use {_ranges(before)}"
        )


def _ranges(cores: set[int]) -> str:
    """0-3,7 for {0, 1, 2, 3, 7}."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
