"""Three classical novels, in three formats and two encodings. Needs HVD_NOVEL_TEST_CORPUS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd_novel.corpus.chapters import split_chapters
from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.prepare import prepare
from hvd_novel.corpus.readers import Record, read_records
from hvd_novel.corpus.store import TokenStore

NOVELS = {"hongloumeng.txt": ("utf-8", 120), "sanguo.gb18030.txt": ("gb18030", 120), "xiyouji.json": ("utf-8", 100)}


@pytest.mark.parametrize("name", NOVELS)
def test_encoding_and_chapters(real_novels: Path, name: str) -> None:
    (record,) = read_records(real_novels / name)
    assert isinstance(record, Record)
    encoding, chapters = NOVELS[name]
    assert record.encoding == encoding
    text = clean(record.text).text
    found = split_chapters(text)
    assert len(found) == chapters
    assert "".join(found) == text
    assert min(map(len, found)) > 900
    assert all(chapter.startswith("第") for chapter in found[1:])


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "gb18030", "utf-8-sig"])
def test_every_encoding_of_a_whole_novel(real_novels: Path, tmp_path: Path, codec: str) -> None:
    (record,) = read_records(real_novels / "sanguo.gb18030.txt")
    assert isinstance(record, Record)
    (tmp_path / "again.txt").write_bytes(record.text.encode(codec))
    (again,) = read_records(tmp_path / "again.txt")
    assert isinstance(again, Record)
    assert again.text == record.text


def test_a_store_of_all_three(real_novels: Path, tmp_path: Path) -> None:
    report = prepare(
        [real_novels],
        tmp_path / "store",
        tokenizer=None,
        vocab_size=600,
        max_len=1024,
        min_len=128,
        overlap=128,
        validation_fraction=0.05,
        seed=1,
    )
    assert report.totals.chapters == 340
    assert [file.status for file in report.files] == ["ok"] * 3
    store = TokenStore.open(tmp_path / "store")
    splits = [store.split(name) for name in ("train", "validation")]
    assert sum(int(split.characters.sum()) for split in splits) == report.totals.characters.kept
    chapters = {(row["novel"], row["chapter"]) for row in splits[1].columns().select(["novel", "chapter"]).to_pylist()}
    assert len(chapters) == 17  # ceil(0.05 * 340)
    assert max(int(split.lengths.max()) for split in splits) == 1024
    assert min(int(split.trained_tokens.min()) for split in splits) >= 128
    tokenizer = store.load_tokenizer()
    first = next(i for i, row in enumerate(splits[0].columns().to_pylist()) if row["token_start"] == 0)
    assert "第一回" in tokenizer.decode(splits[0].input_ids(first))
    assert np.iinfo(splits[0].input_ids(0).dtype).max > 2**31 - 2
