"""The job: its processes, how it starts and ends, and its named collectives."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_novel.comm.hush import starting_threads
from hvd_novel.errors import UserError
from hvd_novel.launcher import launched

if TYPE_CHECKING:
    from compressors.exchange import Wire
    from compressors.ledger import Ledger

T = TypeVar("T")

LostRankError = HorovodInternalError
"""Raised by any collective when another rank has died or gone another way."""

_DEFAULTS = {
    # A rank that died or went another way becomes an error that names the missing ranks, not an endless wait.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
}
_PULSE_SECONDS = 1.0
at_leave: list[Callable[[], None]] = []
"""What all ranks do together before Horovod ends, last one first: it ends MPI too, which many things do not outlast."""
# A process that no launcher started needs no MPI, whose start-up may want a daemon that cannot be found.
_ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
# Horovod's threads meet once a cycle, of 1 ms by default, and under MPI spin until the last has come.
_SELDOM = {"HOROVOD_CYCLE_TIME": "20", "OMPI_MCA_mpi_yield_when_idle": "1"}


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


def init(*, deterministic: bool, process_sets: bool = False, seldom: bool = False) -> Topology:
    """Start Horovod.

    `deterministic` switches tensor fusion off: with it, bits depend on timing at >= 3 ranks. `process_sets` lets sets
    of ranks be made later, as hierarchical compression does. `seldom` is for jobs with few collectives, which may
    take longer then, and leaves the cores to other work between them.
    """
    for name, value in (_DEFAULTS if launched() else _DEFAULTS | _ALONE).items():
        os.environ.setdefault(name, value)
    for name, value in (_SELDOM if seldom else {}).items():
        os.environ.setdefault(name, value)
    if deterministic:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    starting_threads(lambda: hvd.init(process_sets="dynamic" if process_sets else None))
    return topology()


def started() -> bool:
    """Whether Horovod runs, so that ranks can wait for each other."""
    return bool(hvd.is_initialized())


def topology() -> Topology:
    """The topology of the running job."""
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def controller() -> str:
    """What carries Horovod's messages, for the log."""
    engine = "MPI" if hvd.mpi_enabled() else "Gloo"
    return f"{engine} + NCCL" if nccl_built() and torch.cuda.is_available() else engine


def nccl_built() -> bool:
    """Whether Horovod was built to exchange what is on GPUs by NCCL."""
    return bool(hvd.nccl_built())


def all_reduce_sum(values: Sequence[float], name: str) -> list[float]:
    """Element-wise sum over all ranks, in float64."""
    total = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name=name)
    return [float(value) for value in total]


def all_reduce(tensor: torch.Tensor, name: str) -> None:
    """Sum `tensor` over all ranks, in place."""
    hvd.allreduce_(tensor, op=hvd.Sum, name=name)


def all_gather_object(value: T, name: str) -> list[T]:
    """The values of all ranks, in rank order."""
    return list(hvd.allgather_object(value, name=name))


def wire(prefix: str, ledger: Ledger) -> Wire:
    """The collectives of all ranks under names that begin with `prefix`, counted in `ledger`."""
    from compressors.exchange import Wire  # not needed by jobs that train nothing

    return Wire(hvd.global_process_set, prefix, ledger)


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
    _raise_faults(all_gather_object(fault, name))
    return result  # type: ignore[return-value]  # no fault anywhere, so the action returned


def in_parallel(action: Callable[[threading.Event], T], name: str) -> list[T]:
    """Run `action` on every rank and return the results of all, in rank order; UserErrors as in `together`.

    For actions that may take hours on one rank and no time on another: a thread of every rank meets the others' each
    second meanwhile, so that waiting is not taken for a lost rank, and a lost rank is noticed. `action` is given an
    event that is set when another rank has failed: it may return early then, as its result will not be used. This
    rank's result is the object itself, those of others are copies.
    """
    pulse = _Pulse(f"{name}.pulse")
    pulse.start()
    result: T | None = None
    fault: str | None = None
    try:
        result = action(pulse.failure)
    except UserError as error:
        fault = str(error)
    pulse.finish(failed=fault is not None)
    outcomes = all_gather_object((fault, result), name)
    _raise_faults([other for other, _ in outcomes])
    outcomes[hvd.rank()] = None, result
    return [value for _, value in outcomes]  # type: ignore[misc]  # no fault anywhere, so all actions returned


class _Pulse(threading.Thread):
    """Meets the other ranks until all have finished."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self.failure = threading.Event()
        self._name_of_meeting = name
        self._finished = threading.Event()
        self._failed = False
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            finished = False
            while not finished:
                state = [float(self._finished.wait(_PULSE_SECONDS)), float(self._failed)]
                count, failed = all_reduce_sum(state, self._name_of_meeting)
                finished = count == hvd.size()
                if failed:
                    self.failure.set()
        except Exception as error:  # raised by `finish`
            self._error = error
            self.failure.set()

    def finish(self, failed: bool) -> None:
        """This rank has finished: wait for the others. Raises LostRankError if one is gone."""
        self._failed = failed
        self._finished.set()
        self.join()
        if self._error:
            raise self._error


def _raise_faults(faults: Sequence[str | None]) -> None:
    """One UserError for the `faults` of all ranks, None for a rank without one."""
    messages = {text: [rank for rank, other in enumerate(faults) if other == text] for text in faults if text}
    if messages:
        raise UserError("\n".join(_with_ranks(text, ranks, len(faults)) for text, ranks in messages.items()))


def _with_ranks(message: str, ranks: list[int], size: int) -> str:
    return message if len(ranks) == size else f"on rank {', '.join(map(str, ranks))}: {message}"


def leave(code: int) -> NoReturn:
    """End this process with `code` after every rank has come this far, so that no launcher kills a writer.

    Where a rank is lost nobody is waited for.
    """
    if started():
        with contextlib.suppress(LostRankError):
            hvd.barrier()
            while at_leave:
                at_leave.pop()()
            # The first rank to shut down ends Horovod, and with it MPI, on all: none may still be freeing anything.
            hvd.barrier()
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
