"""Training steps of one model with every way to exchange its gradients, beside computing alone.

All ways train copies of the same model on the same random tokens, by AdamW (also `onebit` and `topk`, for which other
optimizers exist: what is timed is the exchange of gradients). They take turns, a step at a time, so that whatever else
the machine does meets all of them; each rank waits for the others before a step, and a step is as long as the slowest
rank's. While a way without Horovod is timed, Horovod's threads stand back if the system lets them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from compressors.ledger import ring_all_reduce_bytes
from compressors.rehearsal import Kind
from hvd_novel import comm
from hvd_novel.bench import peers
from hvd_novel.bench.peers import PEERS
from hvd_novel.bench.ranks import several_ranks
from hvd_novel.bench.ways import COMPUTE, Way, llama, make
from hvd_novel.config import ComputeConfig
from hvd_novel.train.run import set_up_device
from hvd_novel.tuning.measure import measure_link

_DENSE = "none"
_WARM_UP = peers.DENSE_STEPS + 3
_GOOD_LINK = 0.85
"""Share of the link from which dense exchanges are a fair thing to compare with."""


@dataclass(frozen=True)
class Settings:
    """The model and its steps."""

    width: int
    layers: int
    vocabulary: int
    tokens: int
    """Of a rank in a step."""
    rounds: int
    """Timed steps of each way."""
    bucket_mib: float
    """MiB of gradients that compressors send as one; peers keep their own buckets."""
    threads: int | None
    """CPU threads of a rank; None shares the host's cores among its ranks."""
    link_mbit: float | None
    """What the link of a host can carry, in Mbit/s, if it is known."""


@dataclass(frozen=True)
class Timed:
    """One way to train; medians over steps of the slowest rank's."""

    way: str
    seconds: float
    """Forward, backward, exchange and optimizer."""
    tokens_per_second: float
    """Of all ranks."""
    times_compute: float | None
    """Seconds / those of `compute` in the same round, median of these ratios."""
    against_none: float | None
    """Seconds of `none` in the same round / seconds, median of these ratios."""
    against_full_link: float | None
    """The least that dense float32 could take on the whole link, max(`compute`, bytes / rate), / seconds.

    Given where dense exchanges reached less than 85 % of the link's rate.
    """
    bytes_sent: int | None
    """In a step, by the rank that sends most, by the ledger; None where it is not Horovod that sends."""
    encode: float | None
    exchange: float | None
    """Seconds that a step waited for Horovod; what is sent during the backward pass is not waited for."""
    decode: float | None
    first_gradient_error: float
    """Distance of the first step's gradient from the exact mean over ranks, relative to that."""


@dataclass(frozen=True)
class Report:
    """What a run of the benchmark found."""

    ranks: int
    controller: str
    device: str
    parameters: int
    settings: Settings
    hushed: bool
    """Whether Horovod's threads stood back while ways without Horovod were timed."""
    bytes_per_second: float
    """The rate at which a rank sends in a large all-reduce of float32."""
    operation_seconds: float
    """An all-reduce of one number."""
    link_share: float | None
    """`bytes_per_second` / the rate of `Settings.link_mbit`."""
    bytes_dense: int
    """What a float32 ring all-reduce of the gradients sends."""
    ways: list[Timed]


Steps = dict[str, list[tuple[float, ...]]]
"""For each way the (seconds, encode, exchange, decode) of each step; seconds alone where there is no ledger."""


def measure(settings: Settings, names: Sequence[str], say: Callable[[str], None]) -> Report:
    """Time the ways called `names`, some of `ways.WAYS`; every rank calls this.

    Raises UserError on a single rank, and for a model or device that cannot be.
    """
    topology = several_ranks()
    device = comm.together(
        lambda: set_up_device(ComputeConfig(threads=settings.threads), False, topology), "bench.device"
    )
    original = llama(settings.width, settings.layers, settings.vocabulary).to(device)
    link = measure_link(device)
    operation, rate = link.round_seconds, link.rates[Kind.ALL_REDUCE]
    say(f"{topology.size} ranks ({comm.controller()}), {8 * rate / 1e6:.0f} Mbit/s, {1000 * operation:.2f} ms")
    with peers.lost_ranks():
        if any(name in PEERS for name in names):
            peers.join(device)
        ways = {name: make(name, original, int(settings.bucket_mib * 2**20)) for name in names}
        bench = _Bench(settings, original, device)
        errors = bench.first_step(ways)
        for _ in range(_WARM_UP - 1):
            bench.round(ways)
        say(f"warm after {_WARM_UP} steps of each way")
        rounds = [bench.round(ways) for _ in range(settings.rounds)]
        steps = _slowest({name: [taken[name] for taken in rounds] for name in ways})
    sent = {name: _most_sent(way) for name, way in ways.items()}
    peers.leave()
    return _report(settings, device, original, (operation, rate), steps, sent, errors)


class _Bench:
    """Steps of this rank, each with new tokens."""

    def __init__(self, settings: Settings, original: torch.nn.Module, device: torch.device) -> None:
        self._original = original
        self._device = device
        self._shape = (1, settings.tokens)
        self._vocabulary = settings.vocabulary
        self._generator = torch.Generator().manual_seed(comm.topology().rank)

    def first_step(self, ways: dict[str, Way]) -> dict[str, float]:
        """Let each way take its first step; returns `Timed.first_gradient_error` of each."""
        ids = self._tokens()
        exact = Way(self._original, None)
        exact.loss(ids).backward()
        mean = exact.gradient()
        comm.all_reduce(mean, "bench.mean")
        mean /= comm.topology().size
        self._original.zero_grad()
        errors = {}
        for name, way in ways.items():
            way.step(ids)
            errors[name] = float((way.gradient() - mean).norm() / mean.norm())
        every = comm.all_gather_object(errors, "bench.errors")
        return {name: max(of_rank[name] for of_rank in every) for name in ways}

    def round(self, ways: dict[str, Way]) -> dict[str, tuple[float, ...]]:
        """One step of each way."""
        ids = self._tokens()
        return {name: self._timed(way, ids) for name, way in ways.items()}

    def _tokens(self) -> torch.Tensor:
        return torch.randint(self._vocabulary, self._shape, generator=self._generator).to(self._device)

    def _timed(self, way: Way, ids: torch.Tensor) -> tuple[float, ...]:
        comm.all_reduce_sum([0.0], "bench.start")
        with nullcontext() if way.ledger else comm.hushed():
            start = time.perf_counter()
            way.step(ids)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - start
        return (seconds, *(way.ledger.seconds.values() if way.ledger else ()))


def _slowest(own: Steps) -> Steps:
    """Of each step, the rank that took longest."""
    every = comm.all_gather_object(own, "bench.times")
    return {name: [max(ranks) for ranks in zip(*(steps[name] for steps in every), strict=True)] for name in own}


def _most_sent(way: Way) -> int | None:
    return max(comm.all_gather_object(way.ledger.bytes_sent, "bench.bytes")) if way.ledger else None


def _report(
    settings: Settings,
    device: torch.device,
    model: torch.nn.Module,
    measured: tuple[float, float],
    steps: Steps,
    sent: dict[str, int | None],
    errors: dict[str, float],
) -> Report:
    ranks = comm.topology().size
    operation, rate = measured
    nominal = settings.link_mbit * 1e6 / 8 if settings.link_mbit else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dense = ring_all_reduce_bytes(4 * parameters, ranks)
    share = rate / nominal if nominal else None
    # On a link that dense exchanges do not fill, `none` would flatter whatever is compared with it.
    least = dense / nominal if nominal and rate < _GOOD_LINK * nominal else None
    return Report(
        ranks=ranks,
        controller=comm.controller(),
        device=device.type,
        parameters=parameters,
        settings=settings,
        hushed=comm.can_hush(),
        bytes_per_second=rate,
        operation_seconds=operation,
        link_share=share,
        bytes_dense=dense,
        ways=[_way(name, steps, settings.tokens * ranks, least, sent[name], errors[name]) for name in steps],
    )


def _way(name: str, steps: Steps, tokens: int, least: float | None, sent: int | None, error: float) -> Timed:
    seconds, *phases = (statistics.median(column) for column in zip(*steps[name], strict=True))
    encode, exchange, decode = phases or (None, None, None)
    compute = statistics.median(taken[0] for taken in steps[COMPUTE]) if COMPUTE in steps else 0.0
    return Timed(
        way=name,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        times_compute=_ratio(steps, name, COMPUTE),
        against_none=_ratio(steps, _DENSE, name),
        against_full_link=max(compute, least) / seconds if least else None,
        bytes_sent=sent,
        encode=encode,
        exchange=exchange,
        decode=decode,
        first_gradient_error=error,
    )


def _ratio(steps: Steps, name: str, other: str) -> float | None:
    """Median over rounds of the seconds of `name` / those of `other`; None if either was not timed."""
    if name not in steps or other not in steps:
        return None
    return statistics.median(one[0] / two[0] for one, two in zip(steps[name], steps[other], strict=True))


def table(report: Report) -> Table:
    """The ways, a line each."""
    printed = Table(
        title=f"{report.ranks} ranks, {report.parameters:,} parameters, {report.settings.tokens} tokens a rank, "
        f"medians of {report.settings.rounds} steps",
        caption=_describe_link(report),
    )
    full_link = any(row.against_full_link for row in report.ways)
    columns = ["way", "ms", "tokens/s", "x compute", "none / it", "MB sent", "encode", "exchange", "decode"]
    for column in [*columns, *(["full link / it"] if full_link else [])]:
        printed.add_column(column, justify="left" if column == "way" else "right")
    for row in report.ways:
        printed.add_row(
            row.way,
            f"{1000 * row.seconds:.0f}",
            f"{row.tokens_per_second:.0f}",
            _number(row.times_compute),
            _number(row.against_none),
            _number(row.bytes_sent, 1e-6),
            *(_number(phase, 1000, 0) for phase in (row.encode, row.exchange, row.decode)),
            *([_number(row.against_full_link)] if full_link else []),
        )
    return printed


def _describe_link(report: Report) -> str:
    """What the link carried, in words."""
    measured = f"dense float32 reached {8 * report.bytes_per_second / 1e6:.0f} Mbit/s"
    if report.link_share is None:
        return measured
    return f"{measured}, {report.link_share:.0%} of the link's {report.settings.link_mbit:g}"


def _number(value: float | None, factor: float = 1, digits: int = 2) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def as_json(report: Report) -> dict[str, Any]:
    """The fields of `Report`."""
    return asdict(report)
