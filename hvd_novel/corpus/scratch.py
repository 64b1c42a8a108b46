"""What ranks hand to one another while a store is made: a file for each rank to append to, read by all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

_BLOCK = 1 << 20  # characters


class Place(NamedTuple):
    """Where something lies: bytes from `offset` on of the file of `rank`."""

    rank: int
    offset: int


class ScratchWriter:
    """Appends to the file of `rank` among those called `kind`; to be closed before anyone reads."""

    def __init__(self, folder: Path, kind: str, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"{kind}.{rank}").open("wb")

    def __enter__(self) -> ScratchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def text(self, text: str) -> Place:
        """Append a text, four bytes a character, so that any part of it can be read alone."""
        place = self._here()
        for start in range(0, len(text), _BLOCK):
            self._file.write(text[start : start + _BLOCK].encode("utf-32-le"))
        return place

    def integers(self, values: np.ndarray) -> Place:
        """Append `values`, int32."""
        place = self._here()
        self._file.write(values.tobytes())
        return place

    def _here(self) -> Place:
        return Place(self._rank, self._file.tell())


class ScratchReader:
    """Reads parts of the files called `kind`, of all ranks."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._files: dict[int, int] = {}

    def __enter__(self) -> ScratchReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def text(self, place: Place, start: int, end: int) -> str:
        """Characters [start, end) of the text at `place`."""
        return self._read(place, start, end).decode("utf-32-le")

    def integers(self, place: Place, start: int, end: int) -> np.ndarray:
        """Values [start, end) of those at `place`, int32."""
        return np.frombuffer(self._read(place, start, end), np.int32)

    def _read(self, place: Place, start: int, end: int) -> bytes:
        """Items [start, end), of four bytes each."""
        if place.rank not in self._files:
            self._files[place.rank] = os.open(self._folder / f"{self._kind}.{place.rank}", os.O_RDONLY)
        data = os.pread(self._files[place.rank], 4 * (end - start), place.offset + 4 * start)
        assert len(data) == 4 * (end - start), place
        return data
