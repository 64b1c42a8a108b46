"""Horovod's threads made to stand back: a little always, and wholly while something else is timed.

They confer once a cycle, of 1 ms by default, also when there is nothing to send, and under MPI spin until the last has
come. Whatever runs beside them on the same cores pays for that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache

_LOWEST = (os.SCHED_IDLE, os.sched_param(0))
_NICE = 10
"""Of Horovod's threads; where they share cores with the model, steps were 5 to 30 % shorter with it."""
_threads: set[int] = set()


def starting_threads(start: Callable[[], None]) -> None:
    """Run `start`; the threads that it starts are Horovod's, and give way to others from now on."""
    before = _running()
    start()
    started = _running() - before
    for thread in started:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
    _threads.update(started)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Inside, Horovod's threads run only on cores that nobody else wants; as before where `can_hush` denies it.

    Operations go on inside, slowly. Threads are this process's: ranks of a host enter together.
    """
    threads = _threads & _running() if can_hush() else set()
    policies = {thread: (os.sched_getscheduler(thread), os.sched_getparam(thread)) for thread in threads}
    for thread in threads:
        os.sched_setscheduler(thread, *_LOWEST)
    try:
        yield
    finally:
        for thread, policy in policies.items():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(thread, *policy)


@cache
def can_hush() -> bool:
    """Whether this process may raise threads again that it has lowered: root, CAP_SYS_NICE or RLIMIT_NICE."""
    allowed = []

    def try_it() -> None:
        policy = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, *_LOWEST)
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, *policy)
            allowed.append(True)

    trial = threading.Thread(target=try_it)
    trial.start()
    trial.join()
    return bool(allowed)


def _running() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}
