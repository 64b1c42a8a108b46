from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_novel.corpus.segments import SEGMENT_TYPES, segment_type

LABELLED = Path(__file__).with_name("labelled_passages.json")


@pytest.fixture(scope="module")
def passages() -> list[dict[str, str]]:
    loaded: list[dict[str, str]] = json.loads(LABELLED.read_text(encoding="utf-8"))
    return loaded


def test_labelled_file_covers_every_type(passages: list[dict[str, str]]) -> None:
    assert len(passages) >= 80
    assert {p["type"] for p in passages} == set(SEGMENT_TYPES)


def test_accuracy_on_labelled_passages(passages: list[dict[str, str]]) -> None:
    hits = [p["type"] == segment_type(p["text"]) for p in passages]
    assert sum(hits) / len(hits) >= 0.85


@pytest.mark.parametrize("kind", SEGMENT_TYPES)
def test_recall_of_each_type(kind: str, passages: list[dict[str, str]]) -> None:
    found = [segment_type(p["text"]) for p in passages if p["type"] == kind]
    assert found.count(kind) / len(found) >= 0.7


@pytest.mark.parametrize("text", ["", " \n\u3000", "。", "……！？", "“……”", "——", "他", "x", "A dark night."])
def test_text_without_cues_is_plot(text: str) -> None:
    assert segment_type(text) == "plot"


@pytest.mark.parametrize(("text", "kind"), [("山", "scene"), ("了", "plot"), ("眉", "character")])
def test_one_character(text: str, kind: str) -> None:
    assert segment_type(text) == kind


@pytest.mark.parametrize(
    "text",
    [
        "“你来了？”她问。\n“来了。”",
        "「你來了？」她問。\n「來了。」",
        '"你来了？"她问。\n"来了。"',
        '"You came?" she asked. "I did."',
        "——你来了？\n——来了。",
        "僧道：施主从何处来？书生道：从山下来。",
        "“这一段话没有收尾的引号，因为下一段还要接着说下去。",
    ],
)
def test_marks_of_speech(text: str) -> None:
    assert segment_type(text) == "dialogue"


def test_quoted_term_is_no_speech() -> None:
    assert segment_type("人称“铁臂苍龙飞天大圣”，身材魁梧") == "character"


@pytest.mark.parametrize(
    ("simplified", "traditional"),
    [
        ("远处的云压着山头，风吹过树林。", "遠處的雲壓著山頭，風吹過樹林。"),
        ("他骑马赶到城外，当夜便将贼人捉了。", "他騎馬趕到城外，當夜便將賊人捉了。"),
        ("此人脸瘦须长，性情温和，从不与人争。", "此人臉瘦鬚長，性情溫和，從不與人爭。"),
    ],
)
def test_traditional_characters_read_as_simplified(simplified: str, traditional: str) -> None:
    assert segment_type(simplified) == segment_type(traditional)


def test_same_text_same_type(passages: list[dict[str, str]]) -> None:
    texts = [p["text"] for p in passages]
    first = [segment_type(text) for text in texts]
    assert [segment_type(text) for text in reversed(texts)] == first[::-1]
    assert set(first) <= set(SEGMENT_TYPES)
