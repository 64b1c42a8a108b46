"""Writing a token store: samples as they come, dealt to training and validation, the header last."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_novel.corpus import store
from hvd_novel.corpus.aside import OLD, PARTIAL, aside, leftovers, real
from hvd_novel.corpus.genres import GENRES
from hvd_novel.corpus.samples import Sample
from hvd_novel.corpus.segments import SEGMENT_TYPES
from hvd_novel.corpus.store import SPLITS
from hvd_novel.errors import UserError
from hvd_novel.files import flush

_BATCH_ROWS = 1024
_BATCH_TOKENS = 1 << 22  # bounds memory, and the int32 offsets of an Arrow list


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place when the block ends well; otherwise nothing has happened.

    Raises UserError if `out` cannot be made or `check_target` refuses it, before the block or after it.
    """
    check_target(out)
    new = aside(out, PARTIAL)
    try:
        with writing(out):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            yield new
            _sync(new)
            check_target(out)
            _put_in_place(new, real(out))
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turns an OSError in the block, which writes what belongs to `out`, into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--out {out} cannot be written: {reason}; make room there or choose another place") from None


def tidy(out: Path) -> None:
    """Mend what a killed process left beside `out`: put the old store back if it made room, remove the rest."""
    place = real(out)
    for old in leftovers(out, OLD):
        if not store.is_store(place) and store.is_store(old):
            with suppress(OSError):  # something else is there now
                old.rename(place)
    done = leftovers(out, OLD) if store.is_store(place) else []
    for folder in done + leftovers(out, PARTIAL):
        shutil.rmtree(folder, ignore_errors=True)


def check_target(out: Path) -> None:
    """Raise UserError unless `out` is absent, an empty folder, or a token store with nothing else in it."""
    try:
        if real(out).is_symlink():
            raise UserError(f"--out {out} is a symbolic link to itself; choose another folder or remove it")
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another place") from None
    if not store.is_store(out):
        raise UserError(f"--out {out} exists and is not a token store; choose another folder or remove it")
    foreign = store.first_foreign(out)
    if foreign is not None:
        raise UserError(
            f"--out {out} holds {foreign}, which is not part of the token store and would be lost with it; "
            "move it away or choose another folder"
        )


def _put_in_place(new: Path, out: Path) -> None:
    old = aside(out, OLD)
    if out.exists():
        out.rename(old)
    new.rename(out)
    flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


class SplitWriter:
    """Writes train.arrow and validation.arrow in a folder from samples as they come."""

    def __init__(self, folder: Path) -> None:
        self.counts = {name: store.SplitCounts(samples=0, tokens=0, trained_tokens=0, characters=0) for name in SPLITS}
        self._writers = {name: pa.ipc.new_file(str(folder / f"{name}.arrow"), store.SCHEMA) for name in SPLITS}
        self._rows: list[tuple[Sample, int, str]] = []
        self._row_tokens = 0
        self._splits: list[str] = []

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._flush()
        for writer in self._writers.values():
            writer.close()

    def add(self, sample: Sample, novel: int, genre: str, split: str) -> None:
        """Add a sample of the novel with index `novel` to `split`, one of `store.SPLITS`."""
        self._rows.append((sample, novel, genre))
        self._row_tokens += len(sample.input_ids)
        self._splits.append(split)
        if len(self._rows) == _BATCH_ROWS or self._row_tokens >= _BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Write the rows taken so far as one batch of each split."""
        if self._rows:
            batch = _record_batch(self._rows)
            for name, writer in self._writers.items():
                part = batch.filter(pa.array([split == name for split in self._splits]))
                writer.write_batch(part)
                _count(part, self.counts[name])
        self._rows, self._row_tokens, self._splits = [], 0, []


def choose_validation(unit_keys: Sequence[str], fraction: float, seed: int) -> set[int]:
    """Indices of the validation units: the first ceil(fraction x units) in an order that depends on key and seed.

    At least one if there are two or more and `fraction` > 0, never all. Raises ValueError for a fraction outside
    [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be at least 0 and below 1, not {fraction}")
    count = min(math.ceil(Fraction(str(fraction)) * len(unit_keys)), max(0, len(unit_keys) - 1))
    ranks = [hashlib.sha256(f"{seed}:{key}".encode()).digest() for key in unit_keys]
    return set(sorted(range(len(unit_keys)), key=lambda unit: (ranks[unit], unit))[:count])


def write_novels(path: Path, novels: Sequence[dict[str, Any]]) -> None:
    """Write novels.arrow from rows with the columns of `store.NOVEL_SCHEMA`."""
    columns: list[pa.Array] = []
    for field in store.NOVEL_SCHEMA:
        values = [novel[field.name] for novel in novels]
        columns.append(_names(values, GENRES) if field.name == "genre" else pa.array(values, field.type))
    with pa.ipc.new_file(str(path), store.NOVEL_SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, store.NOVEL_SCHEMA))


def write_header(folder: Path, **facts: Any) -> None:
    """Write store.json over all files that `folder` holds; `facts` are the keys of `store.Header` not known here."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    header = {
        "format": store.FORMAT,
        "schema_version": store.SCHEMA_VERSION,
        **facts,
        "files": {name: store.file_facts(folder / name) for name in names},
    }
    header["fingerprint"] = store.fingerprint(header)
    (folder / store.HEADER).write_text(json.dumps(header, indent=1), encoding="utf-8")


def _record_batch(rows: Sequence[tuple[Sample, int, str]]) -> pa.RecordBatch:
    samples, novels, genres = zip(*rows, strict=True)
    lengths = [len(sample.input_ids) for sample in samples]
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    values = pa.array(np.concatenate([sample.input_ids for sample in samples]))
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, values),
        "length": lengths,
        "genre": _names(genres, GENRES),
        "segment_type": _names([sample.segment_type for sample in samples], SEGMENT_TYPES),
        "novel": novels,
    }
    for name in ("context", "chapter", "token_start", "token_end", "characters"):
        columns[name] = [getattr(sample, name) for sample in samples]
    return pa.record_batch([columns[field.name] for field in store.SCHEMA], store.SCHEMA)


def _names(values: Sequence[str], names: tuple[str, ...]) -> pa.DictionaryArray:
    codes = pa.array([names.index(value) for value in values], pa.int8())
    return pa.DictionaryArray.from_arrays(codes, pa.array(names))


def _count(batch: pa.RecordBatch, counts: store.SplitCounts) -> None:
    tokens, context = (int(batch[name].to_numpy().sum(dtype=np.int64)) for name in ("length", "context"))
    counts["samples"] += batch.num_rows
    counts["tokens"] += tokens
    counts["trained_tokens"] += tokens - context
    counts["characters"] += int(batch["characters"].to_numpy().sum(dtype=np.int64))
