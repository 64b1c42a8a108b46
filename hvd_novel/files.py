"""Files that are whole or not there: flushed to disk, and swapped in by a rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


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


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turns what libraries raise in the block, which saves by them, where the disk fails into an OSError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:  # of torch and safetensors
        raise OSError(str(error).splitlines()[0]) from error
    except Exception as error:
        if type(error) is Exception:  # tokenizers has none of its own
            raise OSError(str(error)) from error
        raise
