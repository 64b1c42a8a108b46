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


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
