"""``hvd-novel bench ...``"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.table import Table

from hvd_novel.arguments import MOST, MOST_MIB, AsJson, ConfigFile, Overrides
from hvd_novel.errors import UserError
from hvd_novel.launcher import launched, launched_rank
from hvd_novel.screen import WIDE, console

app = typer.Typer(no_args_is_help=True, help="Measure, and print ratios.")


@app.command()
def convergence(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs; finished ones in it are not repeated.")] = Path(
        "bench/convergence"
    ),
    scheme: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Schemes to compare with dense AdamW (repeat it); default: all."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each scheme.")] = 3,
    lr: Annotated[
        Optional[list[float]],  # noqa: UP045
        typer.Option(help="Rates of which dense training takes the best for all (repeat it); default: the file's."),
    ] = None,
    lr_factor: Annotated[
        list[float],
        typer.Option(min=0.001, max=MOST, help="Train all also with so many times that rate (repeat it)."),
    ] = [],  # noqa: B006
    launcher: Annotated[str, typer.Option(help="Put before each training command.")] = "mpirun --bind-to none -np 2",
    mbit: Annotated[
        list[float],
        typer.Option(min=0.001, max=MOST, help="Mbit/s that a rank sends, for the comparison by time (repeat it)."),
    ] = [200.0],  # noqa: B006
    step_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.001, help="Milliseconds to compute a step, for the same; default: as dense steps took here."
        ),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write loss over steps, bytes and time (at the first --mbit) as a PNG."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Validation loss under each compression scheme against dense training, at equal steps, bytes and time.

    Trains once for each scheme, rate and seed, by `hvd-novel train` under the launcher. Time is that of a model, see
    `hvd_novel/bench/tradeoff.py`. Keys of the JSON object: `summary` and `runs`, explained in
    `hvd_novel/bench/convergence.py`, and `tradeoff`, a list with what `tradeoff.compare` finds for each --mbit.
    """
    from hvd_novel.bench import convergence as bench
    from hvd_novel.bench import tradeoff
    from hvd_novel.train.run import load_config

    overrides = overrides or []
    runs = bench.convergence(
        config,
        overrides,
        out=out.absolute(),
        schemes=scheme or list(bench.SCHEMES),
        seeds=seeds,
        rates=lr or [load_config(config, overrides).optimizer.lr],
        factors=lr_factor,
        launcher=launcher,
        say=_log,
    )
    seconds = step_ms / 1000 if step_ms else tradeoff.step_seconds(runs)
    links = [tradeoff.Link(rate * 1e6 / 8, seconds) for rate in mbit]
    compared = [tradeoff.compare(runs, link) for link in links]
    if plot:
        tradeoff.plot(runs, links[0], plot)
    tables = [bench.table(runs), *(tradeoff.table(found) for found in compared)]
    _print({**bench.as_json(runs), "tradeoff": compared}, tables, as_json)


@app.command()
def comm(
    elements: Annotated[int, typer.Option(min=1000, help="Elements of the gradient.")] = 25_000_000,
    bucket: Annotated[
        Optional[list[float]],  # noqa: UP045
        typer.Option(min=0.001, max=MOST_MIB, help="MiB of gradients that travel as one (repeat it)."),
    ] = None,
    scheme: Annotated[Optional[list[str]], typer.Option(help="Schemes (repeat it); default: all.")] = None,  # noqa: UP045
    steps: Annotated[int, typer.Option(min=1, help="Exchanges of each.")] = 5,
    plot: Annotated[Optional[Path], typer.Option(help="Write times beside their limits as a PNG.")] = None,  # noqa: UP045
    as_json: AsJson = False,
) -> None:
    """Seconds and bytes of one exchange of gradients by each compressor, beside what wire and memory allow.

    To be started under `mpirun` or `horovodrun`; `scripts/bench-netlab` does so on emulated hosts. Keys of the JSON
    object, and what the limits are, are explained in `hvd_novel/bench/comm.py`.
    """
    from hvd_novel.bench import comm as bench
    from hvd_novel.bench import comm_views as views
    from hvd_novel.comm import together

    schemes = _chosen("scheme", scheme, bench.SCHEMES)
    leads = _leads()
    report = bench.measure(
        elements=elements,
        buckets_mib=list(dict.fromkeys(bucket or [25.0])),
        schemes=schemes,
        steps=steps,
        say=_log if leads else lambda line: None,
    )
    if leads:
        tables = [views.table(report), views.model_table(report), views.coding_table(report)]
        _print(bench.as_json(report), tables, as_json)
    if plot:
        together(lambda: views.plot(report, plot) if leads else None, "bench.plot")


@app.command()
def link(
    mib: Annotated[
        float, typer.Option(min=0.001, max=MOST_MIB, help="MiB of gradients in the exchange foretold.")
    ] = 25,
    as_json: AsJson = False,
) -> None:
    """Latency and rates between the ranks, and what an exchange of gradients takes by them.

    To be started under `mpirun` or `horovodrun`, as `hvd-novel launch` does by each network path. Keys of the JSON
    object are explained in `hvd_novel/bench/link.py`.
    """
    from hvd_novel.bench import link as bench

    leads = _leads()
    found = bench.measure(mib)
    if leads:
        _print(found, [bench.table(found, mib)], as_json)


@app.command()
def train(
    way: Annotated[Optional[list[str]], typer.Option(help="Ways to exchange (repeat it); default: all.")] = None,  # noqa: UP045
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a rank in a step.")] = 256,
    width: Annotated[int, typer.Option(min=32, help="Of the model, a multiple of 32.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 8,
    vocabulary: Annotated[int, typer.Option(min=2, help="Of the model.")] = 4096,
    bucket: Annotated[
        float, typer.Option(min=0.001, max=MOST_MIB, help="MiB of gradients that compressors send as one.")
    ] = 25.0,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="CPU threads of a rank; default: the host's cores, shared among its ranks."),
    ] = None,
    link_mbit: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=1e-3, max=MOST, help="What a host's link carries in Mbit/s, to say what share of it was used."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Seconds of a training step: computing alone, with each compressor, and with torch DDP and its hooks.

    To be started under `mpirun` or `horovodrun`; `scripts/bench-netlab` does so on emulated hosts. Every way holds a
    model, its gradients and two moments, and some of them two residuals. Keys of the JSON object are explained in
    `hvd_novel/bench/train.py`.
    """
    from hvd_novel.bench import train as bench
    from hvd_novel.bench.ways import WAYS

    ways = _chosen("way", way, WAYS)
    leads = _leads()
    settings = bench.Settings(width, layers, vocabulary, tokens, rounds, bucket, threads, link_mbit)
    report = bench.measure(settings, ways, say=_log if leads else lambda line: None)
    if leads:
        _print(bench.as_json(report), [bench.table(report)], as_json)


@app.command()
def sharding(
    corpus: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Novels, or a token store, whose lengths are measured beside two lognormals."),
    ] = None,
    ranks: Annotated[list[int], typer.Option(min=1, help="Simulated ranks (repeat it).")] = [8, 64],  # noqa: B006
    cap: Annotated[list[int], typer.Option(min=1, help="Tokens in a pack (repeat it).")] = [8192, 65536],  # noqa: B006
    packs: Annotated[int, typer.Option(min=1, help="Packs of a rank in a step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps, all of an epoch.")] = 200,
    documents: Annotated[int, typer.Option(min=0, help="Time planning an epoch of so many; 0: not.")] = 1_000_000,
    memory: Annotated[int, typer.Option(min=1, help="Documents whose plan's memory is measured.")] = 10_000_000,
    rounds: Annotated[int, typer.Option(min=0, help="Real steps with and without padding; 0: none.")] = 10,
    as_json: AsJson = False,
) -> None:
    """How evenly ranks are loaded with each strategy, simulated; what planning costs; what padding costs.

    Keys of the JSON object: `balance`, `stealing`, `planning`, `padding`, explained in `hvd_novel/bench/` where each
    is measured (`sharding.py`, `planning.py`, `padding.py`).
    """
    from hvd_novel.bench import lengths, padding, planning
    from hvd_novel.bench import sharding as bench

    draws = lengths.sources(corpus)
    found: dict[str, Any] = dict(bench.measure(draws, ranks=ranks, caps=cap, packs=packs, steps=steps))
    tables = [bench.balance_table(found["balance"]), bench.stealing_table(found["stealing"])]
    if documents:
        found["planning"] = planning.measure(documents=documents, many=memory)
        tables.append(planning.table(found["planning"]))
    if rounds:
        found["padding"] = padding.measure(padding.sources(draws), rounds=rounds)
        tables.append(padding.table(found["padding"]))
    _print(found, tables, as_json)


@app.command()
def waits(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Token store.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps, each taken in every way.")] = 40,
    width: Annotated[int, typer.Option(min=8, help="Of the small model.")] = 128,
    as_json: AsJson = False,
) -> None:
    """How long ranks wait for the slowest in real steps, dealt at random, by tokens and by cost.

    To be run by all ranks, as in `mpirun -np 2 hvd-novel bench waits STORE`. Keys of the JSON object are explained
    in `hvd_novel/bench/waits.py`.
    """
    from hvd_novel.bench import waits as bench

    found = bench.measure(store, steps=steps, width=width)
    if found:
        _print(found, [bench.table(found)], as_json)


def _chosen(kind: str, names: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """`names`, each once; all that are `known` if none are given. Raises UserError for others."""
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(f"no {kind} is called {', '.join(unknown)}; there are {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def _leads() -> bool:
    """Whether this process is the job's rank 0. Raises UserError where no launcher started it."""
    if not launched():
        raise UserError("one process exchanges nothing: start this under a launcher, such as mpirun -np 2")
    return launched_rank() == 0


def _print(found: dict[str, Any], tables: list[Table], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for table in tables:
        console(least=WIDE).print(table)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
