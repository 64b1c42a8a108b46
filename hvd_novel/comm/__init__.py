"""The only package of hvd_novel that touches Horovod or MPI.

Everything else speaks of processes (``rank`` of ``size``) and of data-parallel replicas (``replica`` of
``replicas``). Today a replica is one process; nothing outside this package relies on that. Every collective
has a name, the same on all ranks: Horovod matches unnamed ones by a per-process counter, and one extra call on
one rank would stall the job.
"""

from hvd_novel.comm.address import address_of_first, interface_towards
from hvd_novel.comm.arrays import SharedArray, shared_array
from hvd_novel.comm.counter import Counter, shared_counter
from hvd_novel.comm.hush import can_hush, hushed
from hvd_novel.comm.job import (
    LostRankError,
    Topology,
    all_gather_object,
    all_reduce,
    all_reduce_sum,
    broadcast_parameters,
    controller,
    distributed,
    in_parallel,
    init,
    launched,
    leave,
    nccl_built,
    started,
    together,
    topology,
    wire,
)

__all__ = [
    "Counter",
    "LostRankError",
    "SharedArray",
    "Topology",
    "address_of_first",
    "all_gather_object",
    "all_reduce",
    "all_reduce_sum",
    "broadcast_parameters",
    "can_hush",
    "controller",
    "distributed",
    "hushed",
    "in_parallel",
    "init",
    "interface_towards",
    "launched",
    "leave",
    "nccl_built",
    "shared_array",
    "shared_counter",
    "started",
    "together",
    "topology",
    "wire",
]
