"""Seconds and bytes of one exchange of gradients by each compressor, beside what wire and memory allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch.nn import Parameter

import compressors
from compressors.rehearsal import Kind
from hvd_novel import comm
from hvd_novel.bench.coding import passes
from hvd_novel.tuning.measure import measure_coding, measure_link
from hvd_novel.tuning.model import Link, Work, predict
from hvd_novel.tuning.schemes import SCHEMES

_ROWS = 1000
_WARM_UP = 2


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
    """Those bytes / the link's rate, measured in the same run."""
    predicted: float
    """Seconds by the cost model of `tuning.model`: coding rehearsed, latency and rates measured in the same run."""
    error: float
    """`predicted` / `seconds` - 1."""
    against_none: float
    """Seconds of `none` / seconds, medians of interleaved steps."""
    against_fp16: float


@dataclass(frozen=True)
class Report:
    """What a run of the benchmark found."""

    ranks: int
    controller: str
    elements: int
    bytes_per_second: float
    """The rate at which a rank sends in a plain all-reduce of 32 MiB."""
    operation_seconds: float
    """An all-reduce of one number."""
    exchanges: list[Exchange]
    coding: dict[str, dict[str, float]]
    """Passes of a copy, see `coding.passes`; of rank 0, while the others wait."""


def measure(
    *, elements: int, buckets_mib: Sequence[float], schemes: Sequence[str], steps: int, say: Callable[[str], None]
) -> Report:
    """Exchange gradients of `elements` float32 numbers `steps` times by each scheme; every rank calls this."""
    topology = comm.init(deterministic=False)
    torch.set_num_threads(1)
    link = measure_link(torch.device("cpu"))
    rate = link.rates[Kind.ALL_REDUCE]
    say(f"{topology.size} ranks ({comm.controller()}), {8 * rate / 1e6:.0f} Mbit/s, {1000 * link.round_seconds:.2f} ms")
    gradients = _gradients(elements, topology.rank)
    exchanges = []
    for mib in buckets_mib:
        optimizers = {scheme: _optimizer(SCHEMES[scheme], gradients, mib) for scheme in schemes}
        found = _interleaved(optimizers, gradients, steps)
        exchanges += [_exchange(scheme, mib, found, optimizers[scheme], link) for scheme in schemes]
        say(f"buckets of {mib:g} MiB: done")
    coding = comm.all_gather_object(passes(elements, 5) if topology.rank == 0 else {}, "bench.coding")[0]
    return Report(topology.size, comm.controller(), elements, rate, link.round_seconds, exchanges, coding)


def table(report: Report) -> Table:
    """The exchanges, a line each."""
    printed = Table(
        title=f"{report.ranks} ranks, {report.elements:,} elements, {8 * report.bytes_per_second / 1e6:.0f} Mbit/s"
    )
    for column in (
        "scheme",
        "bucket",
        "MB sent",
        "ms",
        "encode",
        "exchange",
        "decode",
        "wire alone",
        "predicted",
        "error",
        "x none",
        "x fp16",
    ):
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in report.exchanges:
        times = (row.seconds, row.encode, row.exchange, row.decode, row.wire_seconds, row.predicted)
        printed.add_row(
            row.scheme,
            f"{row.bucket_mib:g} MiB",
            f"{row.bytes_sent / 1e6:.2f}",
            *(f"{1000 * seconds:.0f}" for seconds in times),
            f"{row.error:+.0%}",
            f"{row.against_none:.1f}",
            f"{row.against_fp16:.1f}",
        )
    return printed


def coding_table(report: Report) -> Table:
    """Coding in passes of a copy."""
    printed = Table(
        title=f"coding on one core, in copies of the tensor ({report.coding['copy']['milliseconds']:.1f} ms)"
    )
    for column in ("codec", "encode", "decode", "both"):
        printed.add_column(column, justify="left" if column == "codec" else "right")
    for name, row in report.coding.items():
        if name != "copy":
            printed.add_row(name, *(f"{row[way]:.2f}" for way in ("encode", "decode", "both")))
    return printed


def as_json(report: Report) -> dict[str, Any]:
    """The fields of `Report`."""
    return asdict(report)


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


def _exchange(scheme: str, mib: float, found: dict[str, list[Any]], optimizer: Any, link: Link) -> Exchange:
    seconds, encode, waited, decode = (statistics.median(column) for column in zip(*found[scheme], strict=True))
    sent = int(max(comm.all_gather_object(optimizer.ledger.bytes_sent, "bench.bytes")))
    predicted = _predicted(scheme, mib, optimizer.param_groups[0]["params"], link)

    def against(other: str) -> float:
        pairs = zip(found.get(other, []), found[scheme], strict=False)
        ratios = [theirs[0] / ours[0] for theirs, ours in pairs]
        return statistics.median(ratios) if ratios else float("nan")

    return Exchange(
        scheme=scheme,
        bucket_mib=mib,
        seconds=seconds,
        encode=encode,
        exchange=waited,
        decode=decode,
        bytes_sent=sent,
        wire_seconds=sent / link.rates[Kind.ALL_REDUCE],
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
