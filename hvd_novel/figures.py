"""Plots as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hvd_novel.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` as a PNG. Raises UserError if it cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file for --plot") from None
