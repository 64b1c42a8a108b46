"""Spans: the pieces of stored samples that packs are made of."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens [start, stop) of the stored sample `document`; never empty."""

    document: int
    start: int
    stop: int
