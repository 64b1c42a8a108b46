from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_novel.corpus import store as stores
from hvd_novel.corpus import writer as writers
from hvd_novel.corpus.genres import GENRES
from hvd_novel.corpus.prepare import prepare
from hvd_novel.corpus.samples import Sample
from hvd_novel.corpus.store import SCHEMA, TokenStore
from hvd_novel.corpus.tokenizer import tokenizer_hash
from hvd_novel.corpus.writer import SplitWriter, choose_validation
from hvd_novel.errors import UserError
from tests.corpus.texts import novel


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two novels with several record batches in each split."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "都市").mkdir()
    (folder / "都市" / "雨.txt").write_text(novel(12), encoding="utf-8")
    (folder / "夜.txt").write_text(novel(9, paragraphs=20), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "_BATCH_ROWS", 16)
        prepare(
            [folder],
            folder / "out",
            tokenizer=None,
            vocab_size=400,
            max_len=200,
            min_len=32,
            overlap=16,
            validation_fraction=0.3,
            seed=1,
        )
    return folder / "out"


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "store"))


@pytest.mark.parametrize("name", ["train", "validation"])
def test_a_split_gives_back_what_is_in_the_file(original: Path, name: str) -> None:
    split = TokenStore.open(original).split(name)
    table = pa.ipc.open_file(pa.memory_map(str(original / f"{name}.arrow"))).read_all()
    assert len(pa.ipc.open_file(str(original / f"{name}.arrow")).schema) == len(SCHEMA)
    assert table["input_ids"].num_chunks > 1
    assert len(split) == table.num_rows > 16
    for index, row in enumerate(table.to_pylist()):
        assert split.input_ids(index).tolist() == row["input_ids"]
        assert (split.genre(index), split.segment_type(index)) == (row["genre"], row["segment_type"])
        assert split.lengths[index] == row["length"] == len(row["input_ids"])
        assert split.context[index] == row["context"]
        assert split.characters[index] == row["characters"]
        assert split.trained_tokens[index] == row["length"] - row["context"] == row["token_end"] - row["token_start"]
    assert split.columns().equals(table)
    assert np.array_equal(split.input_ids(-1), split.input_ids(len(split) - 1))
    with pytest.raises(IndexError):
        split.input_ids(len(split))


def test_columns_are_read_for_some_samples_without_joining_all(original: Path) -> None:
    split = TokenStore.open(original).split("train")
    context = split.column("context")
    generator = np.random.default_rng(0)
    for count in (0, 1, 7, len(split)):
        samples = np.sort(generator.choice(len(split), count, replace=False))
        assert context[samples].tolist() == split.context[samples].tolist()
    lengths = np.empty(len(split), np.int32)
    split.copy_column("length", lengths)
    assert np.array_equal(lengths, split.lengths)
    places = split.codes("genre", GENRES)
    assert [GENRES[place] for place in places] == [split.genre(sample) for sample in range(len(split))]
    assert split.value("context", 3) == split.context[3]


def test_tokens_are_views_of_the_mapped_file(original: Path) -> None:
    split = TokenStore.open(original).split("train")
    before = pa.total_allocated_bytes()
    views = [split.input_ids(index) for index in range(len(split))]
    assert pa.total_allocated_bytes() == before
    assert not any(view.flags.owndata or view.flags.writeable for view in views)
    addresses = [view.__array_interface__["data"][0] for view in views]
    assert max(addresses) - min(addresses) < (original / "train.arrow").stat().st_size
    assert addresses == [split.input_ids(index).__array_interface__["data"][0] for index in range(len(split))]
    for values in (*views, split.lengths, split.context, split.characters, split.trained_tokens):
        assert values.dtype == np.int32


def test_the_store_describes_itself(original: Path) -> None:
    store = TokenStore.open(original)
    header = store.header
    assert (header["max_len"], header["min_len"], header["overlap"]) == (200, 32, 16)
    assert header["vocab_size"] == len(store.load_tokenizer()) == 400
    assert header["tokenizer_hash"] == tokenizer_hash(store.tokenizer_dir)
    assert header["fingerprint"] == store.fingerprint
    for name in ("train", "validation"):
        split, counts = store.split(name), header["counts"][name]
        assert counts["samples"] == len(split)
        assert counts["tokens"] == split.lengths.sum()
        assert counts["trained_tokens"] == split.trained_tokens.sum()
        assert counts["characters"] == split.characters.sum()
        assert max(split.input_ids(index).max() for index in range(len(split))) < header["vocab_size"]
    files = {path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()}
    assert set(header["files"]) == files - {"store.json"}
    with pytest.raises(ValueError, match="no split 'test'"):
        store.split("test")


def test_novels(original: Path) -> None:
    store = TokenStore.open(original)
    novels = store.novels.to_pylist()
    assert [(row["title"], row["genre"], row["chapters"]) for row in novels] == [
        ("夜", "unknown", 9),
        ("雨", "urban", 12),
    ]
    assert [row["characters"] for row in novels] == [len(novel(9, paragraphs=20)), len(novel(12))]
    samples = pa.concat_tables([store.split(name).columns() for name in ("train", "validation")])
    for index, row in enumerate(novels):
        mine = samples.filter(pa.compute.equal(samples["novel"], index))
        assert pa.compute.sum(mine["characters"]).as_py() == row["characters"]
        spans = sorted(zip(mine["token_start"].to_pylist(), mine["token_end"].to_pylist(), strict=True))
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == row["tokens"]
        assert set(mine["genre"].to_pylist()) == {row["genre"]}


def test_a_split_never_parts_a_unit(original: Path) -> None:
    store = TokenStore.open(original)
    units = [
        set(zip(table["novel"].to_pylist(), table["chapter"].to_pylist(), strict=True))
        for table in (store.split(name).columns() for name in ("train", "validation"))
    ]
    assert not units[0] & units[1]
    assert len(units[1]) == 7  # ceil(0.3 * 21)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = [
    "train.arrow",
    "validation.arrow",
    "novels.arrow",
    "report.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [(remove, "is missing from the token store"), (cut, "is damaged: it has"), (flip, "is damaged: its content")],
)
def test_damaged_files_are_named(store: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    damage(store / name)
    with pytest.raises(UserError, match=rf"{name} {message}.*run hvd-novel prepare again"):
        TokenStore.open(store)
    if damage is not flip:
        with pytest.raises(UserError, match=rf"{name} {message}"):
            TokenStore.open(store, verify=False)


def test_another_tokenizer_is_noticed_without_reading_everything(store: Path) -> None:
    path = store / "tokenizer" / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("genre_urban", "genre_nabru"), encoding="utf-8")  # of the same size
    with pytest.raises(UserError, match="tokenizer is not the tokenizer the store was made with"):
        TokenStore.open(store, verify=False)


def test_other_headers(store: Path, tmp_path: Path) -> None:
    path = store / "store.json"
    header = json.loads(path.read_text(encoding="utf-8"))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"schema_version": 2}, "has version 2, this program reads 1; run hvd-novel prepare again"),
        ({"max_len": 201}, "has been changed: its fingerprint does not fit"),
        ({"format": "other"}, "store is not a token store"),
    ]
    for change, message in changes:
        path.write_text(json.dumps({**header, **change}), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            TokenStore.open(store)
    for content in ("{", "[]", ""):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=r"store is not a token store: it has no valid store\.json"):
            TokenStore.open(store)
    path.unlink()
    with pytest.raises(UserError, match="store is not a token store"):
        TokenStore.open(store)
    with pytest.raises(UserError, match="absent does not exist"):
        TokenStore.open(tmp_path / "absent")


def test_an_arrow_file_that_is_none(store: Path) -> None:
    (store / "train.arrow").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=r"train.arrow cannot be read: .*run hvd-novel prepare again"):
        stores.StoreSplit(store / "train.arrow")


def test_an_empty_split(tmp_path: Path) -> None:
    with SplitWriter(tmp_path) as writer:
        writer.add(Sample(np.array([1, 2], np.int32), 1, "plot", 0, 0, 1, 5), novel=0, genre="urban", split="train")
    assert [writer.counts[name]["samples"] for name in ("train", "validation")] == [1, 0]
    split = stores.StoreSplit(tmp_path / "validation.arrow")
    assert len(split) == len(split.lengths) == len(split.trained_tokens) == split.columns().num_rows == 0
    assert split.lengths.dtype == np.int32
    with pytest.raises(IndexError):
        split.input_ids(0)


@given(st.integers(0, 60), st.integers(0, 99), st.integers(0, 5))
def test_validation_units(units: int, percent: int, seed: int) -> None:
    keys = [f"novel:{unit}" for unit in range(units)]
    chosen = choose_validation(keys, percent / 100, seed)
    assert len(chosen) == min(-(-percent * units // 100), max(0, units - 1))
    assert chosen <= set(range(units))
    assert chosen == choose_validation(keys, percent / 100, seed)


def test_validation_units_depend_on_seed_and_content_alone() -> None:
    keys = [f"novel:{unit}" for unit in range(100)]
    assert len(choose_validation(keys, 0.07, 1)) == 7
    assert choose_validation(keys, 0.1, 1) != choose_validation(keys, 0.1, 2)
    chosen = {keys[unit] for unit in choose_validation(keys, 0.1, 1)}
    assert {keys[::-1][unit] for unit in choose_validation(keys[::-1], 0.1, 1)} == chosen
    with pytest.raises(ValueError, match="validation fraction"):
        choose_validation(keys, 1.0, 1)
