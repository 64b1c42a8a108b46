"""The files a corpus consists of, in an order that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_novel.corpus.genres import recognise
from hvd_novel.errors import UserError


@dataclass(frozen=True)
class Source:
    """A file, its name in reports (the given path's last part and what lies below it), the genre of its folder."""

    path: Path
    name: str
    genre: str | None


def find_sources(paths: Sequence[Path], leave_out: Path) -> list[Source]:
    """The files `paths` name, folders taken recursively with names in order, each file once.

    Hidden files and folders and the folder `leave_out` (the store to be written) are passed over. Raises
    UserError for a path that does not exist and if no file is found at all.
    """
    seen = {leave_out.resolve()}
    sources: list[Source] = []
    for given in paths:
        if not given.exists():
            raise UserError(f"{given} does not exist; check the path")
        for path in _walk(given, seen):
            folders = [given.name, *path.relative_to(given).parts[:-1]] if path != given else [given.parent.name]
            name = Path(given.name, path.relative_to(given))
            sources.append(Source(path, name.as_posix(), _nearest_genre(folders)))
    if not sources:
        raise UserError(f"there are no files in {', '.join(map(str, paths))}; give novels or folders of novels")
    return sources


def _walk(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Files at or below `path`; `seen` also ends circles of symbolic links."""
    target = path.resolve()
    if target in seen:
        return
    seen.add(target)
    if not path.is_dir():
        yield path
        return
    try:
        entries = sorted(path.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"the folder {path} cannot be read: {error.strerror}; check its permissions") from None
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _walk(entry, seen)


def _nearest_genre(folders: Sequence[str]) -> str | None:
    return next((genre for folder in reversed(folders) if (genre := recognise(folder))), None)
