"""Arrays of which each node has one copy."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_novel.comm.job import all_gather_object, at_leave, together
from hvd_novel.comm.mpi import usable_mpi
from hvd_novel.errors import UserError


class SharedArray:
    """An array that the ranks of a node hold in common; see `shared_array`."""

    def __init__(self, values: np.ndarray, leader: bool, name: str, *, alone: bool = False) -> None:
        self.values, self._leader, self._name = values, leader, name
        self.alone = alone
        """Whether this process is the only one of the job."""

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
        return SharedArray(np.zeros(count, dtype), True, name, alone=True)
    mpi, fault = usable_mpi() if hvd.mpi_enabled() else (None, "the job runs without MPI")
    if not fault:
        memory, leader = _window(mpi, size)
    else:
        memory, leader = _mapped_file(size, name)
    return SharedArray(np.ndarray(count, dtype, memory), leader, name)


def _meet(name: str) -> None:
    """Wait until every rank is here. (`hvd.barrier` has no name, and calls from two threads could cross.)"""
    if hvd.is_initialized() and hvd.size() > 1:
        hvd.allreduce(torch.zeros(1), name=name)


def _window(mpi: Any, size: int) -> tuple[Any, bool]:
    """`size` bytes that the ranks of this node share, and whether this is the rank that has them."""
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    leader = node.rank == 0
    window = mpi.Win.Allocate_shared(size if leader else 0, 1, comm=node)
    node.Free()
    at_leave.append(window.Free)
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
