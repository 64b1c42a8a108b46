"""The only module that touches Horovod's collectives.

Every operation has a name, the same on all ranks, because Horovod matches unnamed ones by a per-process counter.
An exchange is a generator: it submits operations, yields each one that it must wait for, and returns its result.
Whoever drives many exchanges can thus have the second phases of all of them under way together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from compressors.ledger import Ledger, ring_all_reduce_bytes

_POLL_SECONDS = 1e-4  # at least
_POLL_SHARE = 0.05  # of the time waited so far, by which a wait may be longer


class Pending:
    """A Horovod operation under way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(hvd.poll(self._handle))

    def wait(self) -> Any:
        """The result, once it is there."""
        # hvd.synchronize() spins, on a core that Horovod's own thread, or another rank, may need.
        start = time.perf_counter()
        while not self.done():
            time.sleep(max(_POLL_SECONDS, _POLL_SHARE * (time.perf_counter() - start)))
        return hvd.synchronize(self._handle)


class Wire:
    """The collectives of one process set, under the names of one optimizer, with every byte counted.

    A process outside the set is alone: a set of one rank, which sends nothing. `between` says that what is sent goes
    from node to node of a hierarchy.
    """

    def __init__(self, process_set: Any, prefix: str, ledger: Ledger, *, between: bool = False) -> None:
        self._set = process_set
        self._prefix = prefix
        self._ledger = ledger
        self._between = between
        self._scratch: Tensor | None = None
        included = process_set.included()
        self.ranks: int = process_set.size() if included else 1
        self.rank: int = process_set.rank() if included else 0

    def scratch(self, numel: int, device: torch.device) -> Tensor:
        """A float32 buffer with anything in it, the same one at each call: for what is used up at once."""
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.device != device:
            self._scratch = torch.empty(numel, device=device)
        return self._scratch[:numel]

    def release(self) -> None:
        """Give back the memory of `scratch`."""
        self._scratch = None

    @property
    def members(self) -> list[int]:
        """Horovod's numbers of the set's ranks, ascending."""
        return sorted(self._set.ranks)

    @property
    def resized(self) -> bool:
        """Whether the set has another number of ranks than when this was made."""
        return self._set.included() and self._set.size() != self.ranks

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The ranks (Horovod's, not the set's) on each node. Collective at the first call.

        Raises ValueError if nodes have different numbers of ranks: Horovod then does not tell which rank is where.
        """
        own = [hvd.cross_rank(), hvd.local_size()]
        every = self.gather_if_different(own, "nodes")
        every = every if len(every) == self.ranks else [own] * self.ranks
        if len({size for _, size in every}) > 1:
            raise ValueError("hosts have different numbers of ranks: start equally many on each, or choose nodes=")
        return [
            [rank for rank, (home, _) in zip(self.members, every, strict=True) if home == node]
            for node in sorted({home for home, _ in every})
        ]

    def among(self, groups: Sequence[Sequence[int]], name: str, *, between: bool = False) -> Wire:
        """The wire of this rank's group of ranks (Horovod's). Each rank of this wire is in one of `groups`.

        Process sets that there are not are made; they last as long as Horovod runs. Collective. Raises ValueError
        where they cannot be made.
        """
        sets = [process_set(sorted(group), may_add=self._set.process_set_id == 0) for group in groups]
        own = next(found for found, group in zip(sets, groups, strict=True) if hvd.rank() in group)
        return Wire(own, f"{self._prefix}.{name}", self._ledger, between=between)

    def apart(self, name: str) -> Wire:
        """A wire of the same ranks on which the same names stand for other operations."""
        return Wire(self._set, f"{self._prefix}.{name}", self._ledger, between=self._between)

    def all_reduce(self, tensor: Tensor, name: str, *, average: bool = False) -> Pending:
        """Sum (or average) `tensor` over ranks, in place. int32, int64, float16, float32 or float64."""
        self._sent(ring_all_reduce_bytes(tensor.nbytes, self.ranks))
        return self._all_reduce(tensor, name, average)

    def all_gather(self, part: Tensor, name: str, total_bytes: int | None = None) -> Pending:
        """The parts of all ranks, in rank order, as one flat tensor.

        `total_bytes` is its length, for the ledger; where nobody knows it, all parts are taken to be like this one.
        """
        total = total_bytes or part.nbytes * self.ranks
        self._sent(total * (self.ranks - 1) // self.ranks)
        return self._all_gather(part, name, total)

    def all_to_all(self, parts: Sequence[Tensor], name: str) -> Pending:
        """Send ``parts[r]``, flat, to rank r; gives (what came, elements from each rank)."""
        self._sent(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank))
        return self._all_to_all(parts, name)

    def _all_reduce(self, tensor: Tensor, name: str, average: bool) -> Pending:
        op = hvd.Average if average else hvd.Sum
        return Pending(hvd.allreduce_async_(tensor, op=op, name=self._name(name), process_set=self._set))

    def _all_gather(self, part: Tensor, name: str, total_bytes: int) -> Pending:
        return Pending(hvd.allgather_async(part, name=self._name(name), process_set=self._set))

    def _all_to_all(self, parts: Sequence[Tensor], name: str) -> Pending:
        sizes = torch.tensor([part.numel() for part in parts], dtype=torch.int32)
        return Pending(hvd.alltoall_async(_joined(parts), splits=sizes, name=self._name(name), process_set=self._set))

    def gather_if_different(self, value: Any, name: str) -> list[Any]:
        """The JSON values of all ranks, in rank order; just this rank's if all are equal. Blocks."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        digest = torch.frombuffer(bytearray(hashlib.sha256(bytes(text.tolist())).digest()), dtype=torch.uint8)
        summary = torch.cat([digest.view(torch.int64), torch.tensor([text.numel()])])
        summaries = self._gather(summary, name + ".digest").view(self.ranks, -1)
        if bool((summaries == summary).all()):
            return [value]
        parts = self._gather(text, name).split(summaries[:, -1].tolist())
        return [json.loads(bytes(part.tolist())) for part in parts]

    def _gather(self, part: Tensor, name: str) -> Tensor:
        return hvd.allgather(part, name=self._name(name), process_set=self._set)

    def _name(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _sent(self, count: int) -> None:
        self._ledger.sent(count, between=self._between)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Flat `parts`, one after the other; without a copy where they lie so in memory."""
    storages = {part.untyped_storage().data_ptr() for part in parts}
    places = itertools.accumulate((part.nbytes for part in parts), initial=parts[0].data_ptr())
    if len(storages) == 1 and all(part.data_ptr() == place for part, place in zip(parts, places, strict=False)):
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
    return torch.cat(list(parts))


def process_set(ranks: list[int], *, may_add: bool = True) -> Any:
    """The process set of `ranks`: an existing one, or a new one, which all of Horovod's ranks make together.

    Raises ValueError if there is none and none can be made.
    """
    if len(ranks) == 1:
        return hvd.ProcessSet([])  # without a member: whoever is outside of a set is alone
    for number, members in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items():
        if list(members) == ranks:
            found = hvd.ProcessSet(ranks)
            found.process_set_id = number
            return found
    remedy = f"hvd.init(process_sets=[hvd.ProcessSet({ranks}), ...])"
    if not may_add:
        raise ValueError(f"a part of a process set can be used only if it was made at the start: {remedy}")
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        raise ValueError(
            f"the process set of ranks {ranks} cannot be made: set HOROVOD_DYNAMIC_PROCESS_SETS=1 on every rank, "
            f"or call {remedy}"
        ) from error


def all_gather(wire: Wire, name: str, part: Tensor, sizes: Sequence[int]) -> Generator[Pending, Any, list[Tensor]]:
    """Give every rank the uint8 parts, of `sizes` bytes, of all ranks."""
    joined = yield wire.all_gather(part, name, sum(sizes))
    return list(joined.split(list(sizes)))


def two_phase(
    wire: Wire, name: str, parts: Sequence[Tensor], merge: Callable[[list[Tensor]], Tensor], sizes: Sequence[int]
) -> Generator[Pending, Any, list[Tensor]]:
    """Send ``parts[r]`` to rank r, `merge` what came from each rank to one uint8 part, and give every rank all of them.

    The merged part of rank r has ``sizes[r]`` bytes.
    """
    joined, lengths = yield wire.all_to_all(parts, name + ".scatter")
    merged = merge(list(joined.split(lengths.tolist())))
    return (yield from all_gather(wire, name + ".gather", merged, sizes))
