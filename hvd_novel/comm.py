"""The only module of hvd_novel that touches Horovod or MPI.

Everything else speaks of processes (``rank`` of ``size``) and of data-parallel replicas (``replica`` of
``replicas``). Today a replica is one process; nothing outside this module relies on that. Every collective
has a name, the same on all ranks: Horovod matches unnamed ones by a per-process counter, and one extra call on
one rank would stall the job.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_novel.errors import UserError

T = TypeVar("T")

LostRankError = HorovodInternalError
"""Raised by any collective when another rank has died or gone another way."""

_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_DEFAULTS = {
    # A rank that died or went another way becomes an error that names the missing ranks, not an endless wait.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
}
# A process that no launcher started needs no MPI, whose start-up may want a daemon that cannot be found.
_ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


@dataclass(frozen=True)
class Topology:
    """Where this process stands."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def replica(self) -> int:
        """Index of this process's data-parallel replica."""
        return self.rank

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        return self.size


def launched() -> bool:
    """Whether a launcher started this process, as one rank of a job."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def launched_rank() -> int:
    """The rank that the launcher gave this process, 0 without one; known before Horovod starts."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def init(*, deterministic: bool, process_sets: bool = False) -> Topology:
    """Start Horovod.

    `deterministic` switches tensor fusion off: with it, bits depend on timing at >= 3 ranks. `process_sets` lets sets
    of ranks be made later, as hierarchical compression does.
    """
    for name, value in (_DEFAULTS if launched() else _DEFAULTS | _ALONE).items():
        os.environ.setdefault(name, value)
    if deterministic:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    hvd.init(process_sets="dynamic" if process_sets else None)
    return topology()


def topology() -> Topology:
    """The topology of the running job."""
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def controller() -> str:
    """What carries Horovod's messages, for the log."""
    engine = "MPI" if hvd.mpi_enabled() else "Gloo"
    return f"{engine} + NCCL" if hvd.nccl_built() and torch.cuda.is_available() else engine


def all_reduce_sum(values: Sequence[float], name: str) -> list[float]:
    """Element-wise sum over all ranks, in float64."""
    total = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name=name)
    return [float(value) for value in total]


def all_gather_object(value: T, name: str) -> list[T]:
    """The values of all ranks, in rank order."""
    return list(hvd.allgather_object(value, name=name))


def broadcast_parameters(model: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def together(action: Callable[[], T], name: str) -> T:
    """Run `action` on every rank; if it raised UserError on any, raise one and the same UserError on all.

    Keeps ranks that succeeded from waiting for one that stopped at a file only it could not read.
    """
    result: T | None = None
    fault: str | None = None
    try:
        result = action()
    except UserError as error:
        fault = str(error)
    faults = all_gather_object(fault, name)
    messages = {text: [rank for rank, other in enumerate(faults) if other == text] for text in faults if text}
    if messages:
        raise UserError("\n".join(_with_ranks(text, ranks, len(faults)) for text, ranks in messages.items()))
    return result  # type: ignore[return-value]  # no fault anywhere, so the action returned


def _with_ranks(message: str, ranks: list[int], size: int) -> str:
    return message if len(ranks) == size else f"on rank {', '.join(map(str, ranks))}: {message}"


def leave(code: int) -> NoReturn:
    """End this process with `code` after every rank has come this far, so that no launcher kills a writer."""
    if hvd.is_initialized():
        hvd.barrier()
        while _windows:
            _windows.pop().Free()  # before Horovod ends MPI
        hvd.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def distributed(wrap: Callable[..., Any], optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Wrap `optimizer` so that synchronising sums the gradients of all ranks.

    Raises UserError if it does not go with the options.
    """
    try:
        return wrap(optimizer, op=hvd.Sum, **options)
    except ValueError as error:
        raise UserError(f"optimizer and compression do not go together: {error}") from None


class SharedArray:
    """An array that the ranks of a node hold in common; see `shared_array`."""

    def __init__(self, values: np.ndarray, leader: bool, name: str) -> None:
        self.values, self._leader, self._name = values, leader, name

    def fill(self, write: Callable[[np.ndarray], None]) -> None:
        """Let one rank of each node `write` to `values`, when no rank needs what they were; all wait for it."""
        _meet(f"{self._name}.free")
        if self._leader:
            write(self.values)
        _meet(f"{self._name}.full")


def shared_array(count: int, dtype: type, name: str) -> SharedArray:
    """An array [count], one copy on each node, zero at first; all ranks call this together.

    A shared-memory window where Horovod runs on MPI, elsewhere a memory-mapped file without a name; a plain array in
    a process alone. It lasts until the process ends.
    """
    size = max(1, count * np.dtype(dtype).itemsize)
    if not hvd.is_initialized() or hvd.size() == 1:
        return SharedArray(np.zeros(count, dtype), True, name)
    if hvd.mpi_enabled() and _mpi_is_thread_safe():
        memory, leader = _window(size)
    else:
        memory, leader = _mapped_file(size, name)
    return SharedArray(np.ndarray(count, dtype, memory), leader, name)


def _meet(name: str) -> None:
    """Wait until every rank is here. (`hvd.barrier` has no name, and calls from two threads could cross.)"""
    if hvd.is_initialized() and hvd.size() > 1:
        hvd.allreduce(torch.zeros(1), name=name)


_windows: list[Any] = []


def _mpi_is_thread_safe() -> bool:
    """Whether MPI, which Horovod has started and calls from its own thread, may be called from here as well."""
    return bool(_mpi().Query_thread() == _mpi().THREAD_MULTIPLE)


def _mpi() -> Any:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod starts and ends MPI
    from mpi4py import MPI

    return MPI


def _window(size: int) -> tuple[Any, bool]:
    """`size` bytes that the ranks of this node share, and whether this is the rank that has them."""
    mpi = _mpi()
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    leader = node.rank == 0
    window = mpi.Win.Allocate_shared(size if leader else 0, 1, comm=node)
    node.Free()
    _windows.append(window)
    memory, _ = window.Shared_query(0)
    if leader:
        memory[:] = bytes(size)
    _meet("window.zeroed")
    return memory, leader


def _mapped_file(size: int, name: str) -> tuple[mmap.mmap, bool]:
    """The same, mapped from a file that has no name any more once all ranks have it."""
    hosts = all_gather_object(socket.gethostname(), f"{name}.hosts")
    first = hosts.index(hosts[hvd.rank()])
    leader = first == hvd.rank()
    path = all_gather_object(together(lambda: _make_file(size) if leader else "", f"{name}.file"), f"{name}.path")[
        first
    ]
    try:
        return together(lambda: _map(path, size), f"{name}.map"), leader
    finally:
        if leader:
            os.unlink(path)


def _make_file(size: int) -> str:
    """A file of `size` zero bytes that really has the room, in memory if possible."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="hvd-novel-", dir=folder)
            try:
                os.posix_fallocate(descriptor, 0, size)
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(descriptor)
    raise UserError(f"no room for {size} bytes in /dev/shm or {tempfile.gettempdir()}; free some, or set TMPDIR")


def _map(path: str, size: int) -> mmap.mmap:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(f"cannot map {path}, which another rank of {socket.gethostname()} made: {error}") from None
