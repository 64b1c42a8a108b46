"""A counter that all ranks draw from: what is handed out while everyone computes.

No rank has to answer for the others. Under MPI the counter lies in a window of rank 0 and is drawn from by
one-sided operations, if a trial shows that they do not wait for rank 0's computation: some transports (Open MPI's
osc/pt2pt) serve them only when that process next calls MPI. Otherwise, and always under Gloo, a thread of
`torch.distributed.TCPStore` on rank 0 answers.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from datetime import timedelta
from typing import Any, Protocol

import horovod.torch as hvd
import numpy as np

from hvd_novel.comm.job import LostRankError, all_gather_object, at_leave, together
from hvd_novel.comm.mpi import usable_mpi
from hvd_novel.errors import UserError

_TRIAL_SECONDS = 0.5


class Counter(Protocol):
    """In each of its cells integers from 0 on, each given to one caller of one rank. For the main thread."""

    how: str
    """What carries it and why, for the log."""

    def next(self, cell: int = 0) -> int:
        """The next integer of `cell`. Raises LostRankError if the rank that keeps the counter is gone."""


def shared_counter(name: str, cells: int = 1) -> Counter:
    """A counter that starts at 0. Every rank calls this, with the same new `name`, outside other collectives."""
    if hvd.size() == 1:
        return _LocalCounter(cells)
    if not hvd.mpi_enabled():
        return together(lambda: _StoreCounter(name, "the job runs without MPI"), f"{name}.open")
    counter, fault = _window_counter(name, cells)
    return counter or together(lambda: _StoreCounter(name, fault), f"{name}.open")


class _LocalCounter:
    """Of a job of one process."""

    how = "one process counts for itself"

    def __init__(self, cells: int) -> None:
        self._counts = [itertools.count() for _ in range(cells)]

    def next(self, cell: int = 0) -> int:
        return next(self._counts[cell])


class _WindowCounter:
    """int64 in a window of rank 0: the cells, and one for the trial."""

    def __init__(self, mpi: Any, cells: int) -> None:
        self.how = "MPI fetch-and-op, which did not wait for a rank that computes"
        communicator = mpi.COMM_WORLD.Dup()
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions, and do not abort the job
        item = np.dtype(np.int64).itemsize
        self._window = mpi.Win.Allocate((cells + 1) * item if communicator.rank == 0 else 0, item, comm=communicator)
        self._window.Lock_all()
        if communicator.rank == 0:
            np.frombuffer(self._window.tomemory(), np.int64)[:] = 0
            self._window.Sync()
        self._trial_cell = cells
        self._one, self._result = np.ones(1, np.int64), np.zeros(1, np.int64)
        communicator.Free()  # the window has its own

    def next(self, cell: int = 0) -> int:
        return self._draw(cell)

    def close(self) -> None:
        """Free the window; all ranks call this together."""
        self._window.Unlock_all()
        self._window.Free()

    def trial(self) -> float:
        """Seconds that an operation took while rank 0 computed; 0 on rank 0."""
        start = time.perf_counter()
        if hvd.rank() == 0:
            while time.perf_counter() - start < _TRIAL_SECONDS:
                pass
            return 0.0
        time.sleep(_TRIAL_SECONDS / 5)  # rank 0 has left MPI by then
        start = time.perf_counter()
        self._draw(self._trial_cell)
        return time.perf_counter() - start

    def _draw(self, index: int) -> int:
        self._window.Fetch_and_op(self._one, self._result, 0, index)
        self._window.Flush(0)
        return int(self._result[0])


class _StoreCounter:
    """Of a server thread of rank 0, reached by TCP."""

    def __init__(self, name: str, reason: str) -> None:
        from torch.distributed import TCPStore

        self.how = f"a thread of rank 0 ({reason})"
        self._name = name
        # As long as Horovod waits for a lost rank, which `init` has set; 0 means for ever.
        wait = timedelta(seconds=float(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) or 1e6)
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
        host, port = all_gather_object((_host(), server.port if server else 0), f"{name}.address")[0]
        try:
            self._store = server or TCPStore(host, port, is_master=False, timeout=wait)
        except RuntimeError:
            raise UserError(
                f"cannot reach rank 0 at {host}:{port}; its host must be known to the others by this name, "
                "and connections between the job's hosts must be let through"
            ) from None

    def next(self, cell: int = 0) -> int:
        try:
            return self._store.add(f"{self._name}.{cell}", 1) - 1
        except RuntimeError as error:
            raise LostRankError(f"rank 0, which keeps the counter '{self._name}', does not answer") from error


def _host() -> str:
    """Where the others find this rank."""
    if hvd.local_size() == hvd.size():
        return "localhost"
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _window_counter(name: str, cells: int) -> tuple[_WindowCounter | None, str]:
    """The counter, or None and the reason; the same on all ranks."""
    mpi, fault = usable_mpi()
    if fault := _agreed(fault, f"{name}.mpi4py"):
        return None, fault
    counter = None
    try:
        counter = _WindowCounter(mpi, cells)
    except mpi.Exception as error:
        fault = f"MPI makes no window: {error.Get_error_string()}"
    if fault := _agreed(fault, f"{name}.window"):
        return None, fault
    assert counter is not None
    at_leave.append(counter.close)
    try:
        waited = counter.trial()
        if waited > _TRIAL_SECONDS / 2:
            fault = f"an MPI fetch-and-op waited {waited:.1f} s for a rank that computed"
    except mpi.Exception as error:
        fault = f"MPI fetch-and-op fails: {error.Get_error_string()}"
    if fault := _agreed(fault, f"{name}.trial"):
        return None, fault
    return counter, ""


def _agreed(fault: str, name: str) -> str:
    """The first fault of any rank, empty if there is none."""
    return next((other for other in all_gather_object(fault, name) if other), "")
