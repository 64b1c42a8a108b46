"""The job: its processes, how it starts and ends, and its named collectives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import horovod.torch as hvd
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
