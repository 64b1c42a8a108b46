"""The figures of the model, measured on the ranks of the job. All ranks call these together and get the same."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

import compressors
from compressors.buckets import BUCKET_BYTES
from compressors.exchange import Pending, Wire
from compressors.ledger import Ledger
from compressors.rehearsal import Kind, Rehearsal, rehearse
from hvd_novel import comm
from hvd_novel.tuning.model import Link

_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 7
_TOGETHER = 64  # all-to-alls submitted at once
_PARTS = 4  # tensors in a large exchange, as buckets are several
_LEAST_SECONDS, _LONG_SECONDS = 0.1, 0.5
_SMALLEST, _LARGEST = 2**20, 2**25  # bytes of a large exchange


def measure_link(device: torch.device, compute: Callable[[], object] | None = None) -> Link:
    """Latency and rates between the ranks, of tensors on `device`.

    With `compute`, about a backward pass, also how much of an exchange it hides; otherwise nothing is taken to be
    hidden. Needs two ranks or more.
    """
    ledger = Ledger()
    wire = comm.wire("tuning", ledger)
    tiny = torch.zeros(1, device=device)
    latency = _seconds(lambda: _all([wire.all_reduce(tiny, "small")]), _SMALL_ROUNDS)
    hop = _operation_seconds(wire, device) / (wire.ranks - 1)
    nbytes = _SMALLEST
    while nbytes < _LARGEST and _seconds(_exchange(wire, Kind.ALL_REDUCE, nbytes, device), 1) < _LEAST_SECONDS:
        nbytes *= 2
    rates = {}
    for kind in Kind:
        exchange = _exchange(wire, kind, nbytes, device)
        seconds = _seconds(exchange, _LARGE_ROUNDS)
        ledger.close_step(0)
        exchange()
        ledger.close_step(0)
        sent = max(comm.all_gather_object(ledger.bytes_sent, "tuning.sent"))  # parts may differ by an element
        rates[kind] = sent / max(seconds - latency, seconds / 10)  # on a busy machine latency may be any
    overlap = _overlap(wire, nbytes, device, compute) if compute else 0.0
    return Link(wire.ranks, latency, hop, rates, overlap)


def measure_coding(
    parameters: Sequence[tuple[str, Parameter]],
    schemes: Mapping[str, dict[str, Any]],
    ranks: int,
    *,
    rounds: int = 3,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Rehearsal]:
    """The exchange by each of `schemes` rehearsed for `ranks`, with the coding time of the slowest rank here.

    Ranks code at the same time, as they do in training. Gradients of `parameters` are lost.
    """
    found = {}
    for name, settings in schemes.items():
        comm.all_reduce_sum([0.0], "tuning.start")
        own = rehearse(parameters, compressors.get(**settings), ranks, rounds=rounds, bucket_bytes=bucket_bytes)
        found[name] = dataclasses.replace(own, coding_seconds=slowest(own.coding_seconds))
    return found


def slowest(seconds: float) -> float:
    """The largest of all ranks' `seconds`."""
    return max(comm.all_gather_object(seconds, "tuning.slowest"))


def _operation_seconds(wire: Wire, device: torch.device) -> float:
    """What a small all-to-all adds to others that are under way: Horovod does not fuse them."""
    parts = [torch.zeros(1, device=device)] * wire.ranks

    def exchange(count: int) -> Callable[[], None]:
        return lambda: _all([wire.all_to_all(parts, f"operation.{index}") for index in range(count)])

    one, many = (_seconds(exchange(count), _SMALL_ROUNDS // 2) for count in (1, _TOGETHER))
    return max(0.0, many - one) / (_TOGETHER - 1)


def _exchange(wire: Wire, kind: Kind, nbytes: int, device: torch.device) -> Callable[[], None]:
    """An exchange of `nbytes`, as they are after it, in `_PARTS` tensors."""
    dtype = {Kind.ALL_REDUCE: torch.float32, Kind.ALL_REDUCE_HALF: torch.float16}.get(kind, torch.uint8)
    gathered = kind is Kind.ALL_GATHER
    numel = nbytes // _PARTS // dtype.itemsize // (wire.ranks if gathered else 1)
    # Filled, as memory that was never written to is faster to read.
    tensors = [torch.empty(numel, dtype=dtype, device=device).fill_(0) for _ in range(_PARTS)]

    def submit(index: int, tensor: torch.Tensor) -> Pending:
        name = f"{kind.value}.{index}"
        if gathered:
            return wire.all_gather(tensor, name)
        if kind is Kind.ALL_TO_ALL:
            return wire.all_to_all(tensor.tensor_split(wire.ranks), name)
        return wire.all_reduce(tensor, name)

    return lambda: _all([submit(index, tensor) for index, tensor in enumerate(tensors)])


def _overlap(wire: Wire, nbytes: int, device: torch.device, compute: Callable[[], object]) -> float:
    tensor = torch.empty(nbytes // 4, device=device).fill_(0)

    def both() -> None:
        pending = wire.all_reduce(tensor, "overlap")
        compute()
        pending.wait()

    start = time.perf_counter()
    compute()
    rounds = 1 if slowest(time.perf_counter() - start) > _LONG_SECONDS else _LARGE_ROUNDS
    actions = (compute, lambda: _all([wire.all_reduce(tensor, "overlap")]), both)
    computing, exchanging, together = _interleaved(actions, rounds)
    shorter = min(computing, exchanging)
    return min(1.0, max(0.0, (computing + exchanging - together) / shorter)) if shorter > 0 else 0.0


def _all(pending: Sequence[Pending]) -> None:
    for operation in pending:
        operation.wait()


def _seconds(action: Callable[[], object], rounds: int) -> float:
    return _interleaved([action], rounds)[0]


def _interleaved(actions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Of each action, done in turns, the median after a warm-up, of the slowest rank."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(1 + rounds):
        for action, taken in zip(actions, times, strict=True):
            comm.all_reduce_sum([0.0], "tuning.start")
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [slowest(statistics.median(taken[1:])) for taken in times]
