"""``MANIFEST.json``: what a checkpoint holds, with sizes and CRC32, so that damage is found before it is loaded."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from hvd_novel.files import flush

NAME = "MANIFEST.json"
SCHEMA_VERSION = 1
_BLOCK = 1 << 20


class DamagedError(Exception):
    """A checkpoint that is not whole; the message names the file and the fault."""


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Describe every file of `folder` in its manifest, and flush them all to disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
            flush(path)
    manifest = {"format": "hvd_novel.checkpoint", "schema_version": SCHEMA_VERSION, **facts, "files": files}
    (folder / NAME).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    flush(folder / NAME)
    flush(folder)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder` after checking every file against it. Raises DamagedError."""
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / NAME} cannot be read ({type(error).__name__})") from None
    if version != SCHEMA_VERSION:
        raise DamagedError(f"{folder} has checkpoint version {version}, this program reads {SCHEMA_VERSION}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise DamagedError(f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if _crc32(path) != expected["crc32"]:
            raise DamagedError(f"{path} has changed since it was written (its CRC32 differs)")
    return dict(manifest)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
