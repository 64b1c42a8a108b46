"""The hidden folders beside a store while `hvd-novel prepare` replaces it, and what a killed process left of them.

For the store `novels` and process 7, `.novels.7.partial` is the new store in the making, and `.novels.7.old` is the
former one from the moment it makes room until the new one stands.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PARTIAL, OLD = "partial", "old"


def real(path: Path) -> Path:
    """`path`, absolute and with symbolic links followed; a circle of links is left as it is."""
    return Path(os.path.realpath(path))


def aside(out: Path, kind: str) -> Path:
    """The folder of `kind`, PARTIAL or OLD, that this process uses for the store `out`."""
    out = real(out)
    return out.with_name(f".{out.name}.{os.getpid()}.{kind}")


def leftovers(out: Path, kind: str) -> list[Path]:
    """The folders of `kind` beside `out` whose process is gone, the newest first."""
    out = real(out)
    form = re.compile(rf"\.{re.escape(out.name)}\.(\d+)\.{kind}")
    try:
        matches = [(path, form.fullmatch(path.name)) for path in out.parent.iterdir()]
        found = [path for path, match in matches if match and not _is_another(int(match[1]))]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # nothing can be found, or it is going away this moment
        return []


def _is_another(process: int) -> bool:
    """Whether `process` runs and is not this one (whose number it had before, say in a container)."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
