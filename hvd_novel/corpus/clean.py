"""Cleaning of decoded text. Every character taken away is accounted for; the wording itself is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_LINE_END = re.compile("[\r\x0b\x0c\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff]+")  # a lone surrogate is no character either
_ZERO_WIDTH = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff]+")
# Joiners belong to emoji and to Persian and Indic words; next to Chinese they are noise.
_HAN = "[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
_JOINERS = re.compile(f"(?<={_HAN})[\u200c\u200d]+|[\u200c\u200d]+(?={_HAN})")
_BLANK_LINES = re.compile("\n{3,}")


@dataclass(frozen=True)
class Cleaned:
    """`len(input) == len(text) + sum(removed.values())`; `removed` has a key for each of REASONS."""

    text: str
    removed: dict[str, int]


def clean(text: str) -> Cleaned:
    """Normalise line ends, white space at both ends of lines and blank lines, and drop invisible characters.

    Lines end in one newline, at most one blank line stands between two others, none at either end of the text.
    A lone carriage return, form feed or Unicode line separator becomes a newline and a tab inside a line
    becomes a space, one for one, so that neither counts as removed. Cleaning a cleaned text changes nothing.
    """
    removed = {}
    for reason, step in _STEPS:
        before, text = len(text), step(text)
        removed[reason] = before - len(text)
    return Cleaned(text, removed)


def _line_ends(text: str) -> str:
    return _LINE_END.sub("\n", text.replace("\r\n", "\n"))


def _control(text: str) -> str:
    return _CONTROL.sub("", text)


def _zero_width(text: str) -> str:
    return _JOINERS.sub("", _ZERO_WIDTH.sub("", text))


def _indentation(text: str) -> str:
    return "\n".join([line.lstrip() for line in text.replace("\t", " ").split("\n")])


def _trailing_space(text: str) -> str:
    return "\n".join([line.rstrip() for line in text.split("\n")])


def _blank_lines(text: str) -> str:
    return _BLANK_LINES.sub("\n\n", text.strip("\n"))


_STEPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("line_ends", _line_ends),
    ("control", _control),
    ("zero_width", _zero_width),
    ("indentation", _indentation),
    ("trailing_space", _trailing_space),
    ("blank_lines", _blank_lines),
)
REASONS = tuple(reason for reason, _ in _STEPS)
