"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Training configuration.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's, e.g. `optimizer.lr=1e-4`."),
]
MOST = 1e9
"""Of what has no bound of its own; infinity, which numbers may be, is more."""
MOST_MIB = 2.0**20
"""Of what is given in MiB."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]
