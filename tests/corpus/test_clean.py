from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_novel.corpus.clean import REASONS, clean

ANY_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=[]), st.sampled_from("\r\n\t \u3000\ufeff\u200b\u200d\u200c\x00中，ab"))
)


@given(ANY_TEXT)
def test_every_removed_character_is_accounted_for(text: str) -> None:
    cleaned = clean(text)
    assert set(cleaned.removed) == set(REASONS)
    assert all(count >= 0 for count in cleaned.removed.values())
    assert len(text) == len(cleaned.text) + sum(cleaned.removed.values())


@given(ANY_TEXT)
def test_a_clean_text_stays_as_it_is(text: str) -> None:
    once = clean(text).text
    again = clean(once)
    assert again.text == once
    assert sum(again.removed.values()) == 0


@given(ANY_TEXT)
def test_the_result_is_well_formed(text: str) -> None:
    cleaned = clean(text).text
    assert "\n\n\n" not in cleaned
    assert "\t" not in cleaned
    assert cleaned == cleaned.strip()
    assert all(line == line.strip() for line in cleaned.split("\n"))
    cleaned.encode("utf-8")  # no lone surrogates


@given(st.text(st.sampled_from("中文，。abc 12\n")))
def test_words_stay(text: str) -> None:
    assert clean(text).text.split() == text.split()


@pytest.mark.parametrize(
    ("text", "expected", "reason", "count"),
    [
        ("a\r\nb\r\nc", "a\nb\nc", "line_ends", 2),
        ("a\rb\u2028c\x0cd", "a\nb\nc\nd", "line_ends", 0),
        ("a\x00b\x07c\x7fd\ud800", "abcd", "control", 4),
        ("\ufeff你\u200b好\u2060", "你好", "zero_width", 3),
        ("你\u200c好\u200d，", "你好，", "zero_width", 2),
        ("👩\u200d🚀", "👩\u200d🚀", "zero_width", 0),  # one emoji
        ("می\u200cخواهم", "می\u200cخواهم", "zero_width", 0),  # one Persian word
        ("\u3000\u3000你好\n\t\t他", "你好\n他", "indentation", 4),
        ("你好\u3000 \n他\u00a0", "你好\n他", "trailing_space", 3),
        ("甲\n\n\n\n乙\n \n\t\n丙", "甲\n\n乙\n\n丙", "blank_lines", 3),
        ("\n\n甲\n\n", "甲", "blank_lines", 4),
        ("甲\t乙", "甲 乙", "indentation", 0),
        (" \n\u3000\n", "", "blank_lines", 2),
        ("首页|原创书库 www.example.com", "首页|原创书库 www.example.com", "control", 0),  # site noise stays
    ],
)
def test_each_kind_of_removal(text: str, expected: str, reason: str, count: int) -> None:
    cleaned = clean(text)
    assert cleaned.text == expected
    assert cleaned.removed[reason] == count
