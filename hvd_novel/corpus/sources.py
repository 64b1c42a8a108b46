"""The files a corpus consists of, in an order that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_novel.corpus.aside import real
from hvd_novel.corpus.genres import recognise
from hvd_novel.errors import UserError


@dataclass(frozen=True)
class Source:
    """A file, its name in reports (the given path's last part and what lies below it), the genre of its folder.

    `unreadable` says why nothing at `path`, a file or a folder, can be read; empty otherwise.
    """

    path: Path
    name: str
    genre: str | None
    unreadable: str = ""

    def size(self) -> int:
        """Bytes; 0 for what cannot be read."""
        return self.path.stat().st_size if not self.unreadable and self.path.is_file() else 0


def find_sources(paths: Sequence[Path], leave_out: Path) -> list[Source]:
    """The files `paths` name, folders taken recursively with names in order, each file once.

    Hidden files and folders and the folder `leave_out` (the store to be written) are passed over; a folder that
    cannot be read stands for the files in it. Raises UserError for a path that does not exist or is such a folder,
    and if no file is found at all.
    """
    seen = {real(leave_out)}
    sources: list[Source] = []
    for given in paths:
        _check_given(given)
        for path, unreadable in _walk(given, seen):
            if unreadable and path == given:
                raise UserError(f"{given} cannot be read: {unreadable}; check its permissions")
            folders = [given.name, *path.relative_to(given).parts[:-1]] if path != given else [given.parent.name]
            name = Path(given.name, path.relative_to(given))
            sources.append(Source(path, name.as_posix(), _nearest_genre(folders), unreadable))
    if not sources:
        raise UserError(f"there are no files in {', '.join(map(str, paths))}; give novels or folders of novels")
    return sources


def _check_given(path: Path) -> None:
    try:
        if path.exists():
            return
        reason = "is a symbolic link to nothing" if path.is_symlink() else "does not exist"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise UserError(f"{path} {reason}; check the path")


def _walk(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Files at or below `path`, each with why it is unreadable if it is a folder that cannot be listed.

    `seen` also ends circles of symbolic links.
    """
    target = real(path)
    if target in seen:
        return
    seen.add(target)
    try:
        entries = sorted(path.iterdir(), key=lambda entry: entry.name) if path.is_dir() else None
    except OSError as error:
        yield path, error.strerror or str(error)
        return
    if entries is None:
        yield path, ""
        return
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _walk(entry, seen)


def _nearest_genre(folders: Sequence[str]) -> str | None:
    return next((genre for folder in reversed(folders) if (genre := recognise(folder))), None)
