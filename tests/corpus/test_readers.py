from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_novel.corpus.readers import Problem, Record, read_records
from tests.corpus.texts import SIMPLIFIED, TRADITIONAL


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def problems(path: Path) -> list[str]:
    return [str(item) for item in read_records(path) if isinstance(item, Problem)]


def records(path: Path) -> list[Record]:
    return [item for item in read_records(path) if isinstance(item, Record)]


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "big5"])
def test_texts(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a.TXT").write_bytes(TRADITIONAL.encode(codec))
    (record,) = read_records(tmp_path / "a.TXT")
    assert isinstance(record, Record)
    assert (record.text, record.title) == (TRADITIONAL, None)
    assert record.encoding


def test_bad_bytes_are_a_problem_beside_the_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((SIMPLIFIED * 5).encode() + b"\xff")
    assert list(read_records(tmp_path / "a.txt")) == [
        Problem("1 undecodable byte dropped", dropped_bytes=1),
        Record(SIMPLIFIED * 5, encoding="utf-8"),
    ]


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "gb18030"])
def test_json_object_and_list(tmp_path: Path, codec: str) -> None:
    novel = {"title": "雨", "author": "佚名", "genre": "都市", "content": SIMPLIFIED, "more": [1]}
    (tmp_path / "one.json").write_bytes(json.dumps(novel, ensure_ascii=False).encode(codec))
    (record,) = records(tmp_path / "one.json")
    assert (record.text, record.title, record.author, record.genre) == (SIMPLIFIED, "雨", "佚名", "都市")
    (tmp_path / "list.json").write_bytes(
        json.dumps([novel, {"text": "乙", "title": 1984}, "丙", {"title": "丁"}]).encode()
    )
    assert [(record.text, record.title) for record in records(tmp_path / "list.json")] == [
        (SIMPLIFIED, "雨"),
        ("乙", "1984"),
    ]
    assert problems(tmp_path / "list.json") == ["object 3: not an object", "object 4: no usable 'content' or 'text'"]


def test_content_comes_before_text_unless_it_is_empty(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": "乙", "content": "甲"},
        {"content": "", "text": "丙"},
        {"content": 5, "text": "丁"},
    )
    assert [record.text for record in records(path)] == ["甲", "丙", "丁"]


def test_one_bad_line_of_ten_costs_one_record(tmp_path: Path) -> None:
    lines: list[Any] = [{"content": f"第{number}本", "title": str(number)} for number in range(10)]
    lines[6] = '{"content": "unfinished'
    path = write_lines(tmp_path / "a.jsonl", *lines)
    assert [record.title for record in records(path)] == list("012345789")
    (problem,) = problems(path)
    assert problem.startswith("line 7: invalid JSON: Unterminated string")


def test_blank_lines_are_nothing_and_places_are_line_numbers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", "", {"content": "甲"}, "", "[1]", '{"content": null}', "")
    assert [record.place for record in records(path)] == ["line 2"]
    assert problems(path) == ["line 4: not an object", "line 5: no usable 'content' or 'text'"]


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "gb18030"])
def test_json_lines_in_other_encodings(tmp_path: Path, codec: str) -> None:
    lines = [json.dumps({"content": f"{number}。上海上。" + SIMPLIFIED}, ensure_ascii=False) for number in range(3)]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode(codec))
    assert [record.text[0] for record in records(tmp_path / "a.jsonl")] == ["0", "1", "2"]
    assert problems(tmp_path / "a.jsonl") == []


def test_an_undecodable_line_and_a_damaged_line(tmp_path: Path) -> None:
    good = json.dumps({"content": SIMPLIFIED}, ensure_ascii=False).encode()
    damaged = good.replace("雨".encode(), "雨".encode() + b"\xff")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, good + b"\xff" * 99, damaged]))
    assert [record.place for record in records(tmp_path / "a.jsonl")] == ["line 1", "line 3"]
    assert problems(tmp_path / "a.jsonl")[0].startswith("line 2: undecodable: 99 of")
    assert problems(tmp_path / "a.jsonl")[1] == "line 3: 1 undecodable byte dropped"


@pytest.mark.parametrize("codec", ["gb18030", "big5", "utf-8", "utf-8-sig"])
def test_the_encoding_of_a_file_of_lines_is_judged_from_all_of_it(tmp_path: Path, codec: str) -> None:
    texts = ["修仙", "天下大勢，分久必合。", "plain", "他說", "—", "著"]
    lines = [json.dumps({"content": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode(codec))
    found = records(tmp_path / "a.jsonl")
    assert [record.text for record in found] == texts
    assert {record.encoding for record in found} == {codec.removesuffix("-sig")}
    assert problems(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize("codec", ["gb18030", "big5"])
def test_a_single_short_line(tmp_path: Path, codec: str) -> None:
    for text in ("修仙", "天下大" if codec == "big5" else "天下大势，分久必合。"):
        (tmp_path / "a.jsonl").write_bytes(f'{{"content":"{text}"}}\n'.encode(codec))
        assert [(record.text, record.encoding) for record in records(tmp_path / "a.jsonl")] == [(text, codec)]


@pytest.mark.parametrize("other", ["修仙", "plain"])
def test_a_damaged_line_is_left_out_and_changes_no_encoding(tmp_path: Path, other: str) -> None:
    good = json.dumps({"content": other}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b'\n{"content":"ok\xff\xfe"}\n' + good)
    assert {(record.text, record.encoding) for record in records(tmp_path / "a.jsonl")} == {(other, "utf-8")}
    assert problems(tmp_path / "a.jsonl") == ["line 2: undecodable: 2 of 19 bytes are not utf-8"]


def test_what_is_not_ascii_may_come_late_in_a_file_of_lines(tmp_path: Path) -> None:
    line = json.dumps({"content": "a" * 100_000 + SIMPLIFIED}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes("\n".join(['{"content": "b"}'] * 20_000 + [line]).encode("gb18030"))
    assert records(tmp_path / "a.jsonl")[-1].text.endswith(SIMPLIFIED)


def test_accents_in_a_file_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"content": "café noir"}\n{"content": "plain"}'.encode("cp1252"))
    assert [record.text for record in records(tmp_path / "a.jsonl")] == ["café noir", "plain"]


def test_invalid_json(tmp_path: Path) -> None:
    for content in ('{"content": ', "[" * 100_000, '{"content": "甲"} {"content": "乙"}'):
        (tmp_path / "a.json").write_text(content, encoding="utf-8")
        (problem,) = problems(tmp_path / "a.json")
        assert problem.startswith("invalid JSON")


def test_parquet(tmp_path: Path) -> None:
    rows = [{"text": f"第{number}本", "title": f"书{number}", "genre": "科幻", "score": 1.0} for number in range(40)]
    rows[3]["text"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    found = records(tmp_path / "a.parquet")
    assert [record.title for record in found] == [f"书{number}" for number in range(40) if number != 3]
    assert {record.genre for record in found} == {"科幻"}
    assert problems(tmp_path / "a.parquet") == ["row 4: no usable 'content' or 'text'"]


def test_parquet_without_text_and_broken_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["甲"]}), tmp_path / "a.parquet")
    assert problems(tmp_path / "a.parquet") == ["no column 'content' or 'text'"]
    pq.write_table(pa.table({"text": ["甲" * 1000] * 100}), tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    for damaged in (whole[:-20], b"", b"PAR1", whole[:40] + b"\x00" * 40 + whole[80:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        assert any(problem.startswith("corrupt parquet") for problem in problems(tmp_path / "b.parquet"))


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    assert problems(tmp_path / "a.jpg") == ["unsupported suffix"]
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    assert problems(tmp_path / "link.txt") == ["unreadable: No such file or directory"]
    (tmp_path / "folder.txt").mkdir()
    assert problems(tmp_path / "folder.txt") == ["not a regular file"]
    (tmp_path / "b.txt").write_text("x")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert problems(tmp_path / "b.txt") == ["unreadable: Permission denied"]
