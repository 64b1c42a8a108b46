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
from hvd_novel.corpus.stream import TokenStream
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


def unit_samples(unit: Unit, stream: TokenStream, text: str, genre_id: int, lengths: SampleLengths) -> Iterator[Sample]:
    """The samples of one unit of the novel whose text is `text` and whose stream is `stream`."""
    for window_start, window_end in find_windows(unit.end - unit.start, lengths):
        start, end = unit.start + window_start, unit.start + window_end
        context = min(lengths.overlap, window_start)
        first, last = int(stream.characters[start]), int(stream.characters[end])
        yield Sample(
            input_ids=np.concatenate([np.array([genre_id], np.int32), stream.ids[start - context : end]]),
            context=1 + context,
            segment_type=main_segment_type(text[first:last]),
            chapter=unit.chapter,
            token_start=start,
            token_end=end,
            characters=last - first,
        )


def main_segment_type(text: str) -> str:
    """The segment type that most characters of `text` are in, paragraph by paragraph; ties go by SEGMENT_TYPES."""
    cover: Counter[str] = Counter()
    for paragraph in text.split("\n"):
        if paragraph:
            cover[segment_type(paragraph)] += len(paragraph)
    return max(SEGMENT_TYPES, key=lambda name: cover[name]) if cover else segment_type(text)
