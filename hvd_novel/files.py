"""Files that are whole or not there: flushed to disk, and swapped in by a rename."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`; at any moment the file holds either what it held before or all of `text`."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    flush(aside)
    os.replace(aside, path)
    flush(path.parent)
