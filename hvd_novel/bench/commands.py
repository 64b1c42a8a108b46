"""``hvd-novel bench ...``"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Measure, and print ratios.")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]


@app.command()
def convergence(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Training configuration.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's."),
    ] = None,
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
    launcher: Annotated[str, typer.Option(help="Put before each training command.")] = "mpirun --bind-to none -np 2",
    as_json: AsJson = False,
) -> None:
    """Validation loss under each compression scheme against dense training, at equal steps.

    Trains once for each scheme and seed, by `hvd-novel train` under the launcher.
    """
    from hvd_novel.bench import convergence as bench
    from hvd_novel.train.run import load_config

    overrides = overrides or []
    runs = bench.convergence(
        config,
        overrides,
        out=out.absolute(),
        schemes=scheme or list(bench.SCHEMES),
        seeds=seeds,
        rates=lr or [load_config(config, overrides).optimizer.lr],
        launcher=launcher,
        say=_log,
    )
    if as_json:
        print(json.dumps(bench.as_json(runs)))
    else:
        Console().print(bench.table(runs))


@app.command()
def comm(
    elements: Annotated[int, typer.Option(min=1000, help="Elements of the gradient.")] = 25_000_000,
    bucket: Annotated[
        Optional[list[float]],  # noqa: UP045
        typer.Option(help="MiB of gradients that travel as one (repeat it)."),
    ] = None,
    scheme: Annotated[Optional[list[str]], typer.Option(help="Schemes (repeat it); default: all.")] = None,  # noqa: UP045
    steps: Annotated[int, typer.Option(min=1, help="Exchanges of each.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Seconds and bytes of one exchange of gradients by each compressor, beside what wire and memory allow.

    To be started under `mpirun` or `horovodrun`; `scripts/bench-netlab` does so on emulated hosts.
    """
    from hvd_novel.bench import comm as bench
    from hvd_novel.comm import launched, leave
    from hvd_novel.errors import UserError
    from hvd_novel.launcher import launched_rank

    unknown = [name for name in scheme or () if name not in bench.SCHEMES]
    if unknown:
        raise UserError(f"no scheme is called {', '.join(unknown)}; there are {', '.join(bench.SCHEMES)}")
    if not launched():
        raise UserError("one process exchanges nothing: start this under a launcher, such as mpirun -np 2")
    leads = launched_rank() == 0
    report = bench.measure(
        elements=elements,
        buckets_mib=bucket or [25.0],
        schemes=scheme or list(bench.SCHEMES),
        steps=steps,
        say=_log if leads else lambda line: None,
    )
    if leads and as_json:
        print(json.dumps(bench.as_json(report)))
    elif leads:
        console = Console(width=120)
        console.print(bench.table(report), bench.coding_table(report))
    leave(0)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
