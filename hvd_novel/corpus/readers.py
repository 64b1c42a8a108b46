"""Reading files of novels in the formats users have."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hvd_novel.corpus.encoding import UTF16_BOMS, Decoded, UndecodableError, decode, decode_as, detect_lines
from hvd_novel.corpus.epub import Epub, EpubError, read_epub

_TEXT_FIELDS = ("content", "text")
_FIELDS = (*_TEXT_FIELDS, "title", "author", "genre")
_PARQUET_ROWS = 16  # novels in memory at once
_SAMPLE_BYTES = 1 << 18  # of the lines of a file, to find its encoding
_SAMPLE_LINE = 1 << 14
_SAMPLE_BEFORE = 64  # bytes of ASCII
_ASCII = bytes(range(128))


@dataclass(frozen=True)
class Record:
    """One novel as it stands in a file; `place` says where (empty if the file is the novel)."""

    text: str
    place: str = ""
    title: str | None = None
    author: str | None = None
    genre: str | None = None
    encoding: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something that was left out: all of a file, the object at `place`, or some bytes."""

    reason: str
    place: str = ""
    dropped_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason


Item = Record | Problem


def read_records(path: Path) -> Iterator[Item]:
    """The novels in `path`, and a Problem for everything that cannot be used; raises nothing for bad content."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        yield Problem("unsupported suffix")
        return
    try:
        if path.exists() and not path.is_file():  # a pipe would block for ever
            yield Problem("not a regular file")
            return
        with path.open("rb") as file:
            yield from reader(file)
    except OSError as error:
        yield Problem(f"unreadable: {error.strerror or error}")
    except UndecodableError as error:
        yield Problem(str(error))


def _read_txt(file: BinaryIO) -> Iterator[Item]:
    decoded = decode(file.read())
    yield from _dropped(decoded)
    yield Record(decoded.text, encoding=decoded.encoding)


def _read_json(file: BinaryIO) -> Iterator[Item]:
    decoded = decode(file.read())
    yield from _dropped(decoded)
    try:
        content = json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        yield Problem(f"invalid JSON: {error}")
        return
    if isinstance(content, list):
        for number, fields in enumerate(content, 1):
            yield _record(fields, f"object {number}", decoded.encoding)
    else:
        yield _record(content, "", decoded.encoding)


def _read_jsonl(file: BinaryIO) -> Iterator[Item]:
    start = file.read(3)
    file.seek(0)
    if start.startswith(UTF16_BOMS) or b"\0" in start[:2]:  # JSON begins in ASCII
        # In UTF-16 a newline byte may be half of another character: such a file is decoded as a whole.
        decoded = decode(file.read())
        yield from _dropped(decoded)
        for number, line in enumerate(decoded.text.split("\n"), 1):
            yield from _read_line(line, f"line {number}", decoded.encoding)
        return
    encoding = detect_lines(_sample_lines(file))
    file.seek(len(codecs.BOM_UTF8) if start == codecs.BOM_UTF8 else 0)
    for number, data in enumerate(file, 1):
        place = f"line {number}"
        try:
            decoded = decode_as(encoding, data)
        except UndecodableError as error:
            yield Problem(str(error), place)
        else:
            yield from _dropped(decoded, place)
            yield from _read_line(decoded.text, place, decoded.encoding)


def _sample_lines(file: BinaryIO) -> bytes:
    """Pieces of the lines that are not all ASCII, each from where that begins."""
    pieces, size = [], 0
    for line in file:
        if not line.isascii():
            ascii_bytes = len(line) - len(line.lstrip(_ASCII))
            begin = max(0, ascii_bytes - _SAMPLE_BEFORE)
            pieces.append(line[begin : begin + _SAMPLE_LINE])
            size += len(pieces[-1])
            if size >= _SAMPLE_BYTES:
                break
    return b"".join(pieces)


def _read_line(line: str, place: str, encoding: str) -> Iterator[Item]:
    line = line.strip()
    if not line:
        return
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        yield Problem(f"invalid JSON: {error}".replace("line 1 column", "column"), place)
    else:
        yield _record(fields, place, encoding)


def _read_parquet(file: BinaryIO) -> Iterator[Item]:
    try:
        table = pq.ParquetFile(file)
        columns = [name for name in _FIELDS if name in table.schema_arrow.names]
        if not set(columns) & set(_TEXT_FIELDS):
            yield Problem("no column 'content' or 'text'")
            return
        batches = table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)
        rows = (fields for batch in batches for fields in batch.to_pylist())
        for number, fields in enumerate(rows, 1):
            yield _record(fields, f"row {number}", None)
    except (pa.ArrowException, OSError) as error:
        yield Problem(f"corrupt parquet: {str(error).splitlines()[0]}")


def _read_epub(file: BinaryIO) -> Iterator[Item]:
    try:
        book = read_epub(file)
    except EpubError as error:
        yield Problem(f"corrupt epub: {error}")
        return
    yield from _dropped(book)
    yield Record(book.text, title=book.title, author=book.author)


_READERS: dict[str, Callable[[BinaryIO], Iterator[Item]]] = {
    ".txt": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".epub": _read_epub,
}


def _dropped(content: Decoded | Epub, place: str = "") -> Iterator[Problem]:
    count = content.dropped_bytes
    if count:
        yield Problem(f"{count} undecodable {'byte' if count == 1 else 'bytes'} dropped", place, count)


def _record(fields: Any, place: str, encoding: str | None) -> Item:
    """A record from an object with `content` or `text` and, optionally, `title`, `author` and `genre`."""
    if not isinstance(fields, dict):
        return Problem("not an object", place)
    texts = [text for name in _TEXT_FIELDS if isinstance(text := fields.get(name), str)]
    if not texts:
        return Problem("no usable 'content' or 'text'", place)
    labels = {name: _label(fields.get(name)) for name in ("title", "author", "genre")}
    return Record(max(texts, key=bool), place, encoding=encoding, **labels)  # the first that is not empty


def _label(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) and str(value).strip() else None
