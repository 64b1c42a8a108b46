"""The first step of preparing: files are read, cleaned and split into chapters; texts go to scratch files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvd_novel.corpus.chapters import split_chapters
from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.crew import deal
from hvd_novel.corpus.genres import UNKNOWN, recognise
from hvd_novel.corpus.readers import Item, Problem, Record, read_records
from hvd_novel.corpus.report import Characters, FileReport
from hvd_novel.corpus.scratch import Place, ScratchWriter
from hvd_novel.corpus.sources import Source
from hvd_novel.corpus.work import Work

TEXTS = "texts"


@dataclass(frozen=True)
class Novel:
    """A usable novel, without its text."""

    title: str
    author: str
    genre: str
    path: str
    text: Place
    content: str
    """SHA-256 (hexadecimal) of the text in UTF-8."""
    chapters: np.ndarray
    """int64 [chapters + 1]: where each chapter begins in the text, in characters, and the length of the text."""

    @property
    def characters(self) -> int:
        """Length of the text."""
        return int(self.chapters[-1])


@dataclass
class ReadFile:
    """What a file held."""

    report: FileReport
    """Closed, but for the number of tokens."""
    novels: list[Novel] = field(default_factory=list)
    unrecognised_genres: Counter[str] = field(default_factory=Counter)


def read_files(work: Work, sources: Sequence[Source], scratch: Path) -> list[ReadFile]:
    """What each file holds; the texts go to the scratch files TEXTS of the ranks that read them."""
    sizes = [source.size() for source in sources]

    def read(tasks: Iterator[int]) -> dict[int, ReadFile]:
        found = {}
        with ScratchWriter(scratch, TEXTS, work.rank) as texts:
            for task in tasks:
                work.progress(f"file {task + 1} of {len(sources)}: {sources[task].name}")
                found[task] = read_file(sources[task], texts)
        return found

    return work.share("read", sizes, deal(sizes, work.size), read)


def read_file(source: Source, texts: ScratchWriter) -> ReadFile:
    """Read a file to its end; what cannot be used becomes a line of its report. One novel is in memory at a time."""
    file = ReadFile(FileReport(path=source.name))
    for item in _read(source):
        if isinstance(item, Problem):
            file.report.problems.append(str(item))
            file.report.undecodable_bytes += item.dropped_bytes
        else:
            _add_novel(item, source, file, texts)
    file.report.close()
    return file


def _read(source: Source) -> Iterator[Item]:
    if source.unreadable:
        yield Problem(f"unreadable: {source.unreadable}")
    else:
        yield from read_records(source.path)


def _add_novel(record: Record, source: Source, file: ReadFile, texts: ScratchWriter) -> None:
    cleaned = clean(record.text)
    chapters = split_chapters(cleaned.text)
    report = file.report
    report.encoding = record.encoding
    report.characters.add(Characters(read=len(record.text), kept=len(cleaned.text), removed=cleaned.removed))
    if not chapters:
        report.problems.append(str(Problem("the novel has no text", record.place)))
        return
    report.novels += 1
    report.chapters += len(chapters)
    file.novels.append(
        Novel(
            title=_line(record.title) or source.path.stem,
            author=_line(record.author),
            genre=_genre(record, source, file),
            path=source.name,
            text=texts.text(cleaned.text),
            content=hashlib.sha256(cleaned.text.encode("utf-8")).hexdigest(),
            chapters=np.cumsum([0, *map(len, chapters)], dtype=np.int64),
        )
    )


def _genre(record: Record, source: Source, file: ReadFile) -> str:
    written = _line(record.genre)
    if not written:
        return source.genre or UNKNOWN
    genre = recognise(written)
    if genre is None:
        file.unrecognised_genres[written] += 1
    return genre or UNKNOWN


def _line(label: str | None) -> str:
    """A title, author or genre as one clean line; empty if there is none."""
    return " ".join(clean(label or "").text.split())
