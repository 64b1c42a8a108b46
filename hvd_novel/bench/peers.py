"""What a user would take instead: torch's DistributedDataParallel and its communication hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_novel import comm

_RANK = 4  # as in `comm.SCHEMES`
DENSE_STEPS = 2
"""Steps before DDP's PowerSGD begins, the fewest that it allows; to be past them is the caller's."""


def join(device: torch.device) -> None:
    """Start torch.distributed among the job's ranks: NCCL for CUDA devices, else Gloo. Collective.

    Raises UserError if the ranks do not reach each other.
    """
    topology = comm.topology()
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if topology.rank == 0 else None
    address, port = comm.address_of_first(server.port if server else 0, "peers.address")
    # By default Gloo takes the interface that the host's name stands for, which may not lead to the other hosts.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", comm.interface_towards(address))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=server or dist.TCPStore(address, port, is_master=False),
        rank=topology.rank,
        world_size=topology.size,
        timeout=timedelta(seconds=float(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) or 1e6),
    )


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Turns what torch.distributed raises in the block where another rank has gone into LostRankError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # Gloo has no error of its own
            raise comm.LostRankError(str(error)) from error
        raise


def leave() -> None:
    """End torch.distributed, if it was started."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _plain(model: torch.nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def _fp16(model: torch.nn.Module) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return wrapped


def _powersgd(model: torch.nn.Module) -> DistributedDataParallel:
    # The hook submits operations from callbacks. With Gloo those of several buckets take turns in an order that differs
    # between ranks, which then wait for each other or abort: all gradients in one bucket.
    whole = sum(parameter.nbytes for parameter in model.parameters()) / 2**20 + 1
    wrapped = DistributedDataParallel(model, bucket_cap_mb=whole if dist.get_backend() == "gloo" else None)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=_RANK, start_powerSGD_iter=DENSE_STEPS, random_seed=0
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


PEERS: dict[str, Callable[[torch.nn.Module], DistributedDataParallel]] = {
    "ddp": _plain,
    "ddp-fp16": _fp16,
    "ddp-powersgd": _powersgd,
}
"""Each wraps a model so that backward passes leave the mean over ranks in the gradients; after `join`."""
