"""Seconds and bytes of one exchange of gradients by each compressor, beside what wire and memory allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch.nn import Parameter

import compressors
from hvd_novel import comm
from hvd_novel.bench.coding import passes
from hvd_novel.bench.ranks import several_ranks
from hvd_novel.errors import UserError
from hvd_novel.tuning.measure import measure_coding, measure_link, slowest
from hvd_novel.tuning.model import Link, Work, predict
from hvd_novel.tuning.schemes import SCHEMES

_ROWS = 1000
_WARM_UP = 2
_COPIES = 10  # in a row, so that ranks that do not begin at the same moment still copy at the same time


@dataclass(frozen=True)
class Exchange:
    """One compressor with one bucket size; seconds are medians over steps of the slowest rank's."""

    scheme: str
    bucket_mib: float
    seconds: float
    """From gradients that are there to sums that are there."""
    encode: float
    exchange: float
    decode: float
    bytes_sent: int
    """By the rank that sends most, in a step."""
    wire_seconds: float
    """Those bytes / `Report.bytes_per_second`."""
    memory_bytes: int
    """The least memory traffic of a step, of the rank that has most: each gradient is read, and its sum written; what
    the compressor remembers (residuals, also those of owners of slices, and the like) is read and written. Payloads
    and the buffers of Horovod and the network do not count, as they may stay in caches."""
    memory_seconds: float
    """Those bytes / `Report.copy_bytes_per_second`."""
    share: float
    """Of what wire and memory allow, max(`wire_seconds`, `memory_seconds`) / `seconds`: they could work at the same
    time, on different buckets. Above 1 only where the machine was busy with other things when these were measured."""
    predicted: float
    """Seconds by the cost model of `tuning.model`: coding rehearsed, latency and rates measured in the same run."""
    error: float
    """`predicted` / `seconds` - 1."""
    against_none: float | None
    """Seconds of `none` / seconds, medians of interleaved steps; None if `none` was not run."""
    against_fp16: float | None


@dataclass(frozen=True)
class Report:
    """What a run of the benchmark found."""

    ranks: int
    controller: str
    elements: int
    bytes_per_second: float
    """At which a rank sends in that kind of collective, with float32 or float16, which sends fastest."""
    operation_seconds: float
    """An all-reduce of one number."""
    copy_bytes_per_second: float
    """Bytes that a rank reads and writes in a second while all ranks copy tensors as large as all gradients, with one
    thread each; of the slowest rank."""
    exchanges: list[Exchange]
    coding: dict[str, dict[str, float]]
    """Passes of a copy, see `coding.passes`; of rank 0, while the others wait."""


def measure(
    *, elements: int, buckets_mib: Sequence[float], schemes: Sequence[str], steps: int, say: Callable[[str], None]
) -> Report:
    """Exchange gradients of `elements` float32 numbers `steps` times by each scheme; every rank calls this.

    Matrices have `_ROWS` rows: elements beyond a multiple of that are left out. Raises UserError on a single rank, and
    where memory is too small.
    """
    topology = several_ranks()
    elements -= elements % _ROWS
    comm.together(lambda: _check_memory(elements, len(schemes), topology.local_size), "bench.memory")
    torch.set_num_threads(1)
    link = measure_link(torch.device("cpu"))
    rate = link.highest_rate
    say(f"{topology.size} ranks ({comm.controller()}), {8 * rate / 1e6:.0f} Mbit/s, {1000 * link.round_seconds:.2f} ms")
    copied = _copy_rate(elements)
    gradients = _gradients(elements, topology.rank)
    exchanges = []
    for mib in buckets_mib:
        optimizers = {scheme: _optimizer(SCHEMES[scheme], gradients, mib) for scheme in schemes}
        found = _interleaved(optimizers, gradients, steps)
        exchanges += [_exchange(scheme, mib, found, optimizers[scheme], link, copied) for scheme in schemes]
        say(f"buckets of {mib:g} MiB: done")
    coding = comm.all_gather_object(passes(elements, 5) if topology.rank == 0 else {}, "bench.coding")[0]
    return Report(topology.size, comm.controller(), elements, rate, link.round_seconds, copied, exchanges, coding)


def as_json(report: Report) -> dict[str, Any]:
    """The fields of `Report`."""
    return asdict(report)


def _check_memory(elements: int, schemes: int, ranks: int) -> None:
    """Of this host, whose `ranks` hold gradients, and for each scheme parameters, a copy of them and what it needs."""
    needed, free = 4 * elements * (1 + 3 * schemes) * ranks, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{elements:,} elements need about {needed / 1e9:,.1f} GB on a host, and {free / 1e9:,.1f} GB are free; "
            "give fewer --elements, or some --scheme only"
        )


def _gradients(elements: int, rank: int) -> list[torch.Tensor]:
    """Matrices with `_ROWS` rows and at most a million elements, the last one smaller."""
    generator = torch.Generator().manual_seed(rank)
    widths = [_ROWS] * (elements // _ROWS**2)
    if rest := elements % _ROWS**2 // _ROWS:
        widths.append(rest)
    return [torch.randn(_ROWS, width, generator=generator) for width in widths]


def _optimizer(options: dict[str, Any], gradients: Sequence[torch.Tensor], bucket_mib: float) -> Any:
    parameters = [Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    return comm.distributed(
        compressors.DistributedOptimizer,
        torch.optim.SGD(parameters, lr=0.0),
        named_parameters=_named(parameters),
        compression=compressors.get(**options),
        bucket_bytes=int(bucket_mib * 2**20),
    )


def _named(parameters: Sequence[Parameter]) -> list[tuple[str, Parameter]]:
    return [(f"matrix.{index}", parameter) for index, parameter in enumerate(parameters)]


def _interleaved(optimizers: dict[str, Any], gradients: Sequence[torch.Tensor], steps: int) -> dict[str, list[Any]]:
    """For each scheme the (seconds, encode, exchange, decode) of each step, of the rank that took longest."""
    own: dict[str, list[tuple[float, ...]]] = {scheme: [] for scheme in optimizers}
    for step in range(_WARM_UP + steps):
        for scheme, optimizer in optimizers.items():
            for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                parameter.grad = gradient.clone()
            comm.all_reduce_sum([0.0], "bench.start")
            start = time.perf_counter()
            optimizer.synchronize()
            seconds = time.perf_counter() - start
            if step >= _WARM_UP:
                own[scheme].append((seconds, *optimizer.ledger.seconds.values()))
            with optimizer.skip_synchronize():
                optimizer.step()
    every = comm.all_gather_object(own, "bench.times")
    return {
        scheme: [max(times) for times in zip(*(rank[scheme] for rank in every), strict=True)] for scheme in optimizers
    }


def _copy_rate(elements: int) -> float:
    """`Report.copy_bytes_per_second`."""
    source, target = torch.ones(elements), torch.zeros(elements)  # filled: memory that was never used is no memory yet
    seconds = []
    for _ in range(1 + _WARM_UP):
        comm.all_reduce_sum([0.0], "bench.start")
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return _COPIES * 2 * source.nbytes / slowest(statistics.median(seconds))


def _least_traffic(optimizer: Any) -> int:
    """`Exchange.memory_bytes` of this rank."""
    state = optimizer.compression_state_dict()
    remembered = [tensor for kind in ("residuals", "momenta", "memory") for tensor in state[kind].values()]
    remembered += [part for _, part in state["owed"].values()]
    return 2 * sum(tensor.nbytes for tensor in [*optimizer.param_groups[0]["params"], *remembered])


def _exchange(
    scheme: str, mib: float, found: dict[str, list[Any]], optimizer: Any, link: Link, copied: float
) -> Exchange:
    seconds, encode, waited, decode = (statistics.median(column) for column in zip(*found[scheme], strict=True))
    sent = int(max(comm.all_gather_object(optimizer.ledger.bytes_sent, "bench.bytes")))
    traffic = int(max(comm.all_gather_object(_least_traffic(optimizer), "bench.traffic")))
    wire_seconds, memory_seconds = sent / link.highest_rate, traffic / copied
    predicted = _predicted(scheme, mib, optimizer.param_groups[0]["params"], link)

    def against(other: str) -> float | None:
        if other not in found:
            return None
        return statistics.median(theirs[0] / ours[0] for theirs, ours in zip(found[other], found[scheme], strict=True))

    return Exchange(
        scheme=scheme,
        bucket_mib=mib,
        seconds=seconds,
        encode=encode,
        exchange=waited,
        decode=decode,
        bytes_sent=sent,
        wire_seconds=wire_seconds,
        memory_bytes=traffic,
        memory_seconds=memory_seconds,
        share=max(wire_seconds, memory_seconds) / seconds,
        predicted=predicted,
        error=predicted / seconds - 1,
        against_none=against("none"),
        against_fp16=against("fp16"),
    )


def _predicted(scheme: str, mib: float, parameters: Sequence[Parameter], link: Link) -> float:
    """Seconds that the model gives the exchange alone."""
    settings = {scheme: SCHEMES[scheme]}
    rehearsed = measure_coding(_named(parameters), settings, link.ranks, bucket_bytes=int(mib * 2**20))
    return predict(Work(0.0, 0.0), link, rehearsed[scheme]).seconds
