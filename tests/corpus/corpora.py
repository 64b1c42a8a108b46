"""A corpus of files of every kind, and settings that cut it into many samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.corpus.texts import SIMPLIFIED, TRADITIONAL, novel

OPTIONS: dict[str, Any] = {
    "tokenizer": None,
    "vocab_size": 400,
    "max_len": 200,
    "min_len": 32,
    "overlap": 16,
    "validation_fraction": 0.1,
    "seed": 1,
}


def mixed_corpus(folder: Path) -> Path:
    """Write files of every kind into the new `folder`, with something wrong in several of them."""
    (folder / "玄幻").mkdir(parents=True)
    (folder / "玄幻" / "龙.txt").write_text("\ufeff" + novel(4).replace("\n", "\r\n"), encoding="utf-8")
    (folder / "big5.txt").write_bytes(novel(3, text=TRADITIONAL).replace("这", "這").encode("big5", "ignore"))
    (folder / "cut.txt").write_bytes(novel(2).encode("gb18030")[:-1])
    lines = [
        {"content": novel(2, text=f"第{n}本。" + SIMPLIFIED), "genre": "Sci-Fi", "title": f"书{n}"} for n in range(10)
    ]
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    texts[4] = "{"
    (folder / "many.jsonl").write_text("\n".join(texts), encoding="utf-8")
    objects = [{"content": novel(2, 3), "genre": "烹饪"}, {"content": " \n\u3000 "}, {"title": "空"}]
    (folder / "list.json").write_text(json.dumps(objects), encoding="utf-8")
    pq.write_table(pa.table({"text": [novel(3, 2)], "author": ["佚名"]}), folder / "table.parquet")
    (folder / "cover.jpg").write_bytes(b"\xff\xd8")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "broken.epub").write_bytes(b"PK")
    (folder / "noise.txt").write_bytes(bytes(range(128)) * 50)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """What every file below `folder` holds, by its path in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
