"""The token store: a folder that `hvd-novel prepare` writes and training reads by memory map.

train.arrow, validation.arrow   samples: Arrow IPC files with the columns of SCHEMA
novels.arrow                    one row per novel: the columns of NOVEL_SCHEMA
tokenizer/                      a Hugging Face tokenizer
report.json                     what was read, kept and left out, see `report.Report`
store.json                      the header, written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hvd_novel.corpus.aside import OLD, leftovers
from hvd_novel.corpus.tokenizer import tokenizer_hash
from hvd_novel.errors import UserError

FORMAT = "hvd_novel.store"
SCHEMA_VERSION = 1
HEADER = "store.json"
SPLITS = ("train", "validation")
AGAIN = "run hvd-novel prepare again"

_NAME = pa.dictionary(pa.int8(), pa.string())
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "length": pa.int32(),
        "context": pa.int32(),  # leading tokens whose labels are masked
        "genre": _NAME,
        "segment_type": _NAME,
        "novel": pa.int32(),  # row of novels.arrow
        "chapter": pa.int32(),  # first chapter of the sample's unit
        "token_start": pa.int64(),  # the new tokens in the novel's stream
        "token_end": pa.int64(),
        "characters": pa.int32(),  # characters that the new tokens stand for
    }
)
NOVEL_SCHEMA = pa.schema(
    {
        "title": pa.string(),
        "author": pa.string(),
        "genre": _NAME,
        "path": pa.string(),
        "chapters": pa.int32(),
        "characters": pa.int64(),
        "tokens": pa.int64(),  # of the novel's stream, each of them new in one sample
    }
)


class SplitCounts(TypedDict):
    """Sums over the samples of a split."""

    samples: int
    tokens: int
    trained_tokens: int
    characters: int


class Header(TypedDict):
    """The content of store.json."""

    format: str
    schema_version: int
    tokenizer_hash: str
    vocab_size: int
    max_len: int
    min_len: int
    overlap: int
    counts: dict[str, SplitCounts]
    files: dict[str, dict[str, Any]]
    """For each file of the store, by its path in it: `bytes` and `sha256`."""
    fingerprint: str
    """SHA-256 of all the rest of the header, and so of everything in the store."""


class TokenStore:
    """A store opened for reading; see `open`."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._splits: dict[str, StoreSplit] = {}

    @classmethod
    def open(cls, path: Path, verify: bool = True) -> TokenStore:
        """Open the store in the folder `path` after checking it.

        Always checked are the header, the sizes of all files and the tokenizer; `verify` reads every file to
        compare its SHA-256. Raises UserError that names the file at fault.
        """
        header = _read_header(path)
        for name, facts in header["files"].items():
            _check_file(path / name, facts, verify)
        tokenizer = path / "tokenizer"
        try:
            same = tokenizer_hash(tokenizer) == header["tokenizer_hash"]
        except (OSError, ValueError):
            same = False
        if not same:
            raise UserError(f"{tokenizer} is not the tokenizer the store was made with; {AGAIN}")
        return cls(path, header)

    @property
    def fingerprint(self) -> str:
        """Equal for two stores if and only if their contents are."""
        return self.header["fingerprint"]

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the store's tokenizer."""
        return self.path / "tokenizer"

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The store's tokenizer."""
        return AutoTokenizer.from_pretrained(self.tokenizer_dir, local_files_only=True)

    def split(self, name: str) -> StoreSplit:
        """The split `name`, one of SPLITS, memory-mapped. Raises ValueError for another name."""
        if name not in SPLITS:
            raise ValueError(f"no split {name!r}; there are {SPLITS}")
        if name not in self._splits:
            self._splits[name] = StoreSplit(self.path / f"{name}.arrow")
        return self._splits[name]

    @cached_property
    def novels(self) -> pa.Table:
        """The novels, with the columns of NOVEL_SCHEMA."""
        return pa.Table.from_batches(_map_batches(self.path / "novels.arrow")[1], NOVEL_SCHEMA)


class Column:
    """Numbers of all samples in the mapped file, read without a copy of the whole."""

    def __init__(self, parts: list[np.ndarray], first: np.ndarray) -> None:
        self._parts, self._first = parts, first

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        """The numbers of `samples`, an int array that ascends."""
        bounds = np.searchsorted(samples, self._first)
        chosen = [
            self._parts[batch][samples[bounds[batch] : bounds[batch + 1]] - self._first[batch]]
            for batch in np.flatnonzero(np.diff(bounds))
        ]
        return np.concatenate(chosen) if chosen else np.empty(0, np.int32)


class StoreSplit:
    """The samples of one split, in the order of the corpus; everything stays in the mapped file until asked for.

    `lengths`, `context` and `characters` are the int32 [samples] columns of SCHEMA; they are joined, and so copied,
    when first used.
    """

    def __init__(self, path: Path) -> None:
        mapped, self._batches = _map_batches(path)
        self._words = np.frombuffer(mapped, np.int32, count=mapped.size // 4)
        self._bases = [_base(batch["input_ids"], mapped.address) for batch in self._batches]
        self._offsets = [batch["input_ids"].offsets.to_numpy() for batch in self._batches]
        self._first = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._first[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        return self._joined("length")

    @cached_property
    def context(self) -> np.ndarray:
        """Tokens at the start of each sample that are no labels."""
        return self._joined("context")

    @cached_property
    def characters(self) -> np.ndarray:
        """Characters that the trained tokens of each sample stand for."""
        return self._joined("characters")

    @cached_property
    def trained_tokens(self) -> np.ndarray:
        """Tokens of each sample whose labels are trained, int32 [samples]."""
        return self.lengths - self.context

    def column(self, name: str) -> Column:
        """The int32 column `name` of SCHEMA."""
        return Column([batch[name].to_numpy(zero_copy_only=True) for batch in self._batches], self._first)

    def copy_column(self, name: str, out: np.ndarray) -> None:
        """Write the int32 column `name` of SCHEMA to `out`, int32 [samples]."""
        for batch, first in zip(self._batches, self._first[:-1], strict=True):
            out[first : first + batch.num_rows] = batch[name].to_numpy(zero_copy_only=True)

    def input_ids(self, index: int) -> np.ndarray:
        """The tokens of a sample, int32 [length]: a read-only view of the mapped file."""
        batch, row = self._place(index)
        start, stop = self._offsets[batch][row : row + 2]
        return self._words[self._bases[batch] + start : self._bases[batch] + stop]

    def value(self, name: str, index: int) -> Any:
        """The value of a sample in the column `name` of SCHEMA."""
        batch, row = self._place(index)
        return self._batches[batch][name][row].as_py()

    def genre(self, index: int) -> str:
        """The genre of a sample, one of `genres.GENRES`."""
        return str(self.value("genre", index))

    def segment_type(self, index: int) -> str:
        """The segment type of a sample, one of `segments.SEGMENT_TYPES`."""
        return str(self.value("segment_type", index))

    def codes(self, name: str, names: Sequence[str]) -> np.ndarray:
        """A column of names as their places in `names`, uint8 [samples]."""
        codes = np.empty(len(self), np.uint8)
        for batch, first in zip(self._batches, self._first[:-1], strict=True):
            places = np.array([names.index(found) for found in batch[name].dictionary.to_pylist()], np.uint8)
            codes[first : first + batch.num_rows] = places[batch[name].indices.to_numpy(zero_copy_only=True)]
        return codes

    def columns(self) -> pa.Table:
        """All samples as a table with the columns of SCHEMA, over the mapped file."""
        return pa.Table.from_batches(self._batches, SCHEMA)

    def _place(self, index: int) -> tuple[int, int]:
        """The batch that a sample lies in, and its row there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"no sample {index}; there are {len(self)}")
        index %= len(self)
        batch = int(np.searchsorted(self._first, index, side="right")) - 1
        return batch, index - int(self._first[batch])

    def _joined(self, name: str) -> np.ndarray:
        """A column as one array; of a single batch it is a view."""
        arrays = [batch[name].to_numpy(zero_copy_only=True) for batch in self._batches]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.int32), *arrays])


def fingerprint(header: dict[str, Any]) -> str:
    """SHA-256 (hexadecimal) of a header without its own fingerprint."""
    rest = {key: value for key, value in header.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode("ascii")).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as the header keeps them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def is_store(path: Path) -> bool:
    """True if `path` is a token store of any version, whole or damaged."""
    try:
        header = json.loads((path / HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def first_foreign(path: Path) -> str | None:
    """The first entry, by name, of the token store `path` that its header does not list; None if there is none."""
    listed = json.loads((path / HEADER).read_text(encoding="utf-8")).get("files")
    known = {Path(HEADER)}
    for name in listed if isinstance(listed, dict) else ():
        known |= {Path(name), *Path(name).parents}
    entries = (entry.relative_to(path) for entry in path.rglob("*"))
    return min((entry.as_posix() for entry in entries if entry not in known), default=None)


def _read_header(path: Path) -> Header:
    old = [] if path.exists() else [folder for folder in leftovers(path, OLD) if is_store(folder)]
    if old:
        raise UserError(f"the token store {path} is at {old[0]}: replacing it was interrupted; rename it, or {AGAIN}")
    if not path.is_dir():
        raise UserError(f"the token store {path} does not exist; make it with hvd-novel prepare ... --out {path}")
    if not is_store(path):
        raise UserError(f"{path} is not a token store: it has no valid {HEADER}; make one with hvd-novel prepare")
    header: Header = json.loads((path / HEADER).read_text(encoding="utf-8"))
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path / HEADER} has version {version}, this program reads {SCHEMA_VERSION}; {AGAIN}")
    if header.get("fingerprint") != fingerprint(dict(header)):
        raise UserError(f"{path / HEADER} has been changed: its fingerprint does not fit; {AGAIN}")
    return header


def _check_file(path: Path, facts: dict[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing from the token store; {AGAIN}")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise UserError(f"{path} is damaged: it has {size} bytes instead of {facts['bytes']}; {AGAIN}")
    if verify and file_facts(path) != facts:
        raise UserError(f"{path} is damaged: its content has changed; {AGAIN}")


def _map_batches(path: Path) -> tuple[pa.Buffer, list[pa.RecordBatch]]:
    """The whole of an Arrow IPC file as one mapped buffer, and its record batches, which lie in that buffer."""
    try:
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
        reader = pa.ipc.open_file(mapped)
        return mapped, [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}; {AGAIN}") from None


def _base(lists: pa.ListArray, base: int) -> int:
    """Where the values of lists of int32 begin, in words from the address `base`."""
    values = lists.values.buffers()[1]
    assert lists.values.offset == 0
    if values is None:
        return 0
    offset, rest = divmod(values.address - base, 4)
    assert rest == 0
    return int(offset)
