"""What `hvd-novel prepare` read, kept and left out: report.json, and tables for people."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

_MOST_FILES = 20
_PERCENTILES = {"min": 0, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}


class Section(BaseModel):
    """Base of the report's parts: documented keys, no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Characters(Section):
    """An account that closes: read = kept + what was removed, by reason."""

    read: int = 0
    """Characters decoded from the file."""
    kept: int = 0
    """Characters of the cleaned texts, each of them in exactly one sample's count."""
    removed: dict[str, int] = {}
    """By the reasons of `clean.REASONS`."""

    def add(self, other: Characters) -> None:
        """Add another account to this one."""
        self.read += other.read
        self.kept += other.kept
        self.removed = dict(Counter(self.removed) + Counter(other.removed))

    def check(self) -> None:
        """Assert that the account closes."""
        assert self.read == self.kept + sum(self.removed.values()), self


class FileReport(Section):
    """One file."""

    path: str
    """The given path's last part and what lies below it."""
    status: Literal["ok", "partial", "skipped"] = "ok"
    """`partial`: something was left out, and something kept."""
    reason: str = ""
    """What was left out and why; in full in `problems`."""
    problems: list[str] = []
    encoding: str | None = None
    """None for parquet and EPUB."""
    novels: int = 0
    chapters: int = 0
    tokens: int = 0
    undecodable_bytes: int = 0
    """Dropped; the rest was kept."""
    characters: Characters = Characters()

    def close(self) -> None:
        """Set status and reason from what was found, and check the account."""
        self.characters.check()
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            self.reason = self.problems[0] + more
            self.status = "partial" if self.novels else "skipped"


class Totals(Section):
    """Sums over all files."""

    files: int
    ok: int
    partial: int
    skipped: int
    novels: int
    chapters: int
    samples: int
    tokens: int
    """Tokens of the novels' streams, each of them new, and so trained, in exactly one sample."""
    sample_tokens: int
    """With the genre token and the overlap of each sample."""
    undecodable_bytes: int
    characters: Characters


class Share(Section):
    """A part of the samples, and its trained tokens."""

    samples: int
    tokens: int


class Report(Section):
    """The content of report.json."""

    totals: Totals
    splits: dict[str, Share]
    lengths: dict[str, float]
    """Sample lengths in tokens: min, p5, p25, p50, p75, p95, p99, max, mean."""
    genres: dict[str, Share]
    segment_types: dict[str, Share]
    unrecognised_genres: dict[str, int]
    """Genres as written that mean none of ours, and how many novels have them; these novels are `unknown`."""
    files: list[FileReport]


def sum_up(files: list[FileReport], *, samples: int, sample_tokens: int) -> Totals:
    """Sum up `files`; the account of characters over all of them closes too."""
    characters = Characters()
    for file in files:
        characters.add(file.characters)
    characters.check()
    statuses = Counter(file.status for file in files)
    return Totals(
        files=len(files),
        ok=statuses["ok"],
        partial=statuses["partial"],
        skipped=statuses["skipped"],
        novels=sum(file.novels for file in files),
        chapters=sum(file.chapters for file in files),
        samples=samples,
        tokens=sum(file.tokens for file in files),
        sample_tokens=sample_tokens,
        undecodable_bytes=sum(file.undecodable_bytes for file in files),
        characters=characters,
    )


def length_percentiles(lengths: np.ndarray) -> dict[str, float]:
    """Percentiles (each the length of a sample) and the mean of `lengths`, int [samples]."""
    values = np.percentile(lengths, list(_PERCENTILES.values()), method="nearest")
    percentiles = {name: float(value) for name, value in zip(_PERCENTILES, values, strict=True)}
    return {**percentiles, "mean": round(float(lengths.mean()), 2)}


def shares(names: pa.ChunkedArray, tokens: np.ndarray) -> dict[str, Share]:
    """Samples and tokens per name that occurs in `names`, a dictionary column; `tokens` is int [samples]."""
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in names.chunks])
    found = {}
    for code, name in enumerate(names.chunk(0).dictionary.to_pylist()):
        mine = codes == code
        if mine.any():
            found[name] = Share(samples=int(mine.sum()), tokens=int(tokens[mine].sum(dtype=np.int64)))
    return found


def render(report: Report, console: Console) -> None:
    """Print the report as tables; of more than 20 files only those from which something was left out."""
    console.print(_files_table(report.files))
    if any(file.reason for file in report.files):
        console.print(_reasons_table(report.files))
    console.print(_totals_table(report))
    console.print(_shares_table("genre", report.genres))
    console.print(_shares_table("segment type", report.segment_types))
    if report.unrecognised_genres:
        written = ", ".join(f"{name} ({count})" for name, count in report.unrecognised_genres.items())
        console.print(f"genres not recognised, counted as unknown: {escape(written)}")


def _files_table(files: list[FileReport]) -> Table:
    shown = files if len(files) <= _MOST_FILES else [file for file in files if file.status != "ok"]
    caption = None if len(shown) == len(files) else f"{len(files) - len(shown)} more files are ok"
    table = Table(_whole("file"), caption=caption)
    for name in ("status", "encoding"):
        table.add_column(name, no_wrap=True)
    for name in ("chapters", "characters", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for file in shown:
        counts = (f"{file.chapters:,}", f"{file.characters.kept:,}", f"{file.tokens:,}")
        table.add_row(escape(file.path), file.status, file.encoding or "-", *counts)
    return table


def _reasons_table(files: list[FileReport]) -> Table:
    """A table of its own, so that reasons and names are readable on a narrow terminal."""
    table = Table(_whole("file"), _whole("left out"))
    for file in files:
        if file.reason:
            table.add_row(escape(file.path), escape(file.reason))
    return table


def _whole(name: str) -> Column:
    """A column whose texts go on in the next line, wherever they must be broken."""
    return Column(name, overflow="fold")


def _totals_table(report: Report) -> Table:
    sums, table = report.totals, _table("total", numbers=("",))
    removed = ", ".join(f"{reason} {count:,}" for reason, count in sums.characters.removed.items())
    lengths = ", ".join(f"{name} {value:g}" for name, value in report.lengths.items())
    splits = ", ".join(f"{name} {share.samples:,} samples" for name, share in report.splits.items())
    rows = {
        "files": f"{sums.files:,} ({sums.ok:,} ok, {sums.partial:,} partial, {sums.skipped:,} skipped)",
        "novels, chapters": f"{sums.novels:,}, {sums.chapters:,}",
        "characters": f"{sums.characters.read:,} read = {sums.characters.kept:,} kept + removed ({removed or 'none'})",
        "undecodable bytes": f"{sums.undecodable_bytes:,}",
        "samples": f"{sums.samples:,} ({splits})",
        "tokens": f"{sums.tokens:,} trained, {sums.sample_tokens:,} with context",
        "sample lengths": lengths,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _shares_table(title: str, found: dict[str, Share]) -> Table:
    table = _table(title, numbers=("samples", "tokens"))
    for name, share in found.items():
        table.add_row(name, f"{share.samples:,}", f"{share.tokens:,}")
    return table


def _table(*texts: str, numbers: tuple[str, ...], caption: str | None = None) -> Table:
    table = Table(*texts, caption=caption)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
