"""Lengths of documents to measure sharding on: two lognormals, and those of real chapters or samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from hvd_novel.corpus.chapters import split_chapters
from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.readers import Record, read_records
from hvd_novel.corpus.sources import find_sources
from hvd_novel.corpus.store import TokenStore, is_store
from hvd_novel.errors import UserError

Draw = Callable[[int], np.ndarray]
"""Lengths of so many documents, int32; the same each time."""


def lognormal(count: int, *, median: float, sigma: float, shortest: int, longest: int) -> np.ndarray:
    """Lognormal lengths, int32 [count], those outside the limits moved there."""
    drawn = np.random.default_rng(1).lognormal(np.log(median), sigma, count)
    return np.clip(drawn, shortest, longest).astype(np.int32)


LN_A: Draw = partial(lognormal, median=2000, sigma=0.7, shortest=300, longest=12_000)
LN_B: Draw = partial(lognormal, median=1800, sigma=1.0, shortest=300, longest=32_000)


def resampled(found: np.ndarray, count: int) -> np.ndarray:
    """`count` of the lengths `found`, drawn with replacement, int32 [count]."""
    return np.random.default_rng(1).choice(found, count).astype(np.int32)


def lengths_in(path: Path) -> np.ndarray:
    """Tokens of the training samples of a token store, or characters of the chapters of novels, int32.

    Raises UserError if there are none.
    """
    if is_store(path):
        found = TokenStore.open(path).split("train").lengths
    else:
        sources = find_sources([path], path / "none")
        records = (record for source in sources for record in read_records(source.path))
        texts = (clean(record.text).text for record in records if isinstance(record, Record))
        found = np.array([len(chapter) for text in texts for chapter in split_chapters(text)], np.int32)
    if not found.any():
        raise UserError(f"{path} holds no text; give a token store or a folder of novels")
    return found


def sources(path: Path | None) -> dict[str, Draw]:
    """All that is measured, by name; with what is in `path`, see `lengths_in`."""
    found: dict[str, Draw] = {"LN-A": LN_A, "LN-B": LN_B}
    if path:
        found[path.name] = partial(resampled, lengths_in(path))
    return found
