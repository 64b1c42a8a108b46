"""Samples: a novel's token stream cut into pieces of bounded length, so that every token is new in exactly one.

A *unit* is a chapter, or several neighbours where one alone would be shorter than `min_len`; it ends with a chapter
separator or the end of text. A sample is

    genre token | context: the `overlap` tokens before, from the same unit | new tokens

of at most `max_len` tokens. The new tokens of a unit's samples are the unit, in order. Labels of the genre token and
the context are masked; the first new token is predicted, at the start of a unit from the genre token alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hvd_novel.corpus.segments import SEGMENT_TYPES, segment_type
from hvd_novel.errors import UserError


@dataclass(frozen=True)
class SampleLengths:
    """In tokens. Raises UserError for lengths that leave a sample no room for `min_len` new tokens."""

    max_len: int
    min_len: int
    overlap: int

    def __post_init__(self) -> None:
        least = 2 * self.min_len + self.overlap + 1
        if self.min_len < 1 or self.overlap < 0 or self.max_len < least:
            raise UserError(
                f"--max-len {self.max_len}, --min-len {self.min_len} and --overlap {self.overlap} do not fit together: "
                f"--min-len must be at least 1, --overlap at least 0, and --max-len at least 2 x min-len + overlap + 1 "
                f"(here {least})"
            )


@dataclass(frozen=True)
class Unit:
    """Tokens [start, end) of a novel's stream; `chapter` is the index of the first chapter in it."""

    chapter: int
    start: int
    end: int


@dataclass(frozen=True)
class Window:
    """A sample's new tokens, [start, end) of a novel's stream, and how many tokens before them are its context."""

    chapter: int
    """Index of the unit's first chapter."""
    start: int
    end: int
    overlap: int


@dataclass(frozen=True)
class Sample:
    """One training document. The store keeps each field as a column, see `store.SCHEMA`."""

    input_ids: np.ndarray
    """int32 [length]"""
    context: int
    """Leading tokens whose labels are masked: the genre token and the overlap."""
    segment_type: str
    chapter: int
    """Index of the unit's first chapter."""
    token_start: int
    token_end: int
    """The new tokens are [token_start, token_end) of the novel's stream."""
    characters: int
    """Characters of the novel's text that the new tokens complete."""


def find_units(chapter_tokens: Sequence[int], min_len: int) -> list[Unit]:
    """Join chapters, each to the next and the last to the one before, until every unit has `min_len` tokens.

    Only a novel shorter than `min_len` stays below.
    """
    units: list[Unit] = []
    chapter, start, end = 0, 0, 0
    for index, tokens in enumerate(chapter_tokens):
        end += tokens
        if end - start >= min_len:
            units.append(Unit(chapter, start, end))
            chapter, start = index + 1, end
    if start < end:
        last = units.pop() if units else Unit(chapter, start, end)
        units.append(Unit(last.chapter, last.start, end))
    return units


def find_windows(length: int, lengths: SampleLengths) -> list[tuple[int, int]]:
    """Spans of new tokens that partition a unit of `length` tokens, each at least `min_len` (or all of the unit)."""
    room = lengths.max_len - 1 - lengths.overlap
    bounds = [0, *range(lengths.max_len - 1, length, room), length]
    if len(bounds) > 2 and length - bounds[-2] < lengths.min_len:  # the last two share
        bounds[-2] = length - min((length - bounds[-3]) // 2, room)
    return [(start, end) for start, end in pairwise(bounds) if start < end]


def unit_windows(unit: Unit, lengths: SampleLengths) -> Iterator[Window]:
    """The windows of one unit, in order."""
    for start, end in find_windows(unit.end - unit.start, lengths):
        yield Window(unit.chapter, unit.start + start, unit.start + end, min(lengths.overlap, start))


def make_sample(window: Window, ids: np.ndarray, genre_id: int, segment_type: str, characters: int) -> Sample:
    """The sample of a window; `ids` are its tokens with the overlap before them, int32."""
    return Sample(
        input_ids=np.concatenate([np.array([genre_id], np.int32), ids]),
        context=1 + window.overlap,
        segment_type=segment_type,
        chapter=window.chapter,
        token_start=window.start,
        token_end=window.end,
        characters=characters,
    )


def main_segment_type(text: str) -> str:
    """The segment type that most characters of `text` are in, paragraph by paragraph; ties go by SEGMENT_TYPES."""
    cover: Counter[str] = Counter()
    for paragraph in text.split("\n"):
        if paragraph:
            cover[segment_type(paragraph)] += len(paragraph)
    return max(SEGMENT_TYPES, key=lambda name: cover[name]) if cover else segment_type(text)
