"""The curriculum: what kinds of samples come early, in the middle and late in a run, and how long they may be.

It arranges the random order of an epoch before steps are cut from it: each step takes short, medium and long samples
in the shares of its phase, as long as all that the phase asks for last; what is left of the epoch is then mixed
evenly. Inside a length class samples of heavier segment types and genres tend to come earlier. Every sample is still
trained once in each epoch, and nothing is sorted by length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_novel.config import CurriculumConfig, nearest
from hvd_novel.corpus.genres import GENRES
from hvd_novel.corpus.segments import SEGMENT_TYPES
from hvd_novel.corpus.store import StoreSplit
from hvd_novel.sharding import kernels


class Curriculum:
    """The curriculum of a run of `steps` steps over a split with `kinds`, uint8 [documents], see `kinds_of`."""

    def __init__(self, settings: CurriculumConfig, steps: int, kinds: np.ndarray) -> None:
        self._settings, self._steps, self._kinds = settings, steps, kinds
        self._starts = np.array([round(share * steps) for share in settings.boundaries], np.int64)
        self._mixes = np.array([settings.early, settings.middle, settings.late])
        self._mixes /= self._mixes.sum(axis=1, keepdims=True)
        self._weights = np.array(
            [
                settings.segment_weights.get(segment, 1.0) * settings.genre_weights.get(genre, 1.0)
                for genre in GENRES
                for segment in SEGMENT_TYPES
            ]
        )

    def phase(self, step: int) -> int:
        """0, 1 or 2: early, middle or late."""
        return int((step >= self._starts).sum())

    def longest(self, step: int) -> int | None:
        """The most tokens in a span of `step`; None sets no limit."""
        return self._settings.max_lengths[self.phase(step)]

    def arrange(
        self, order: np.ndarray, lengths: np.ndarray, *, seed: int, most: int, steps: int, total: int, first_step: int
    ) -> None:
        """Rearrange `order`, the random order of the epoch that begins at `first_step` of the run.

        `most`, `steps` and `total` say how it is cut into steps, see `kernels.step_bounds`.
        """
        thresholds = np.array(self._settings.thresholds, np.int64)
        documents, starts = kernels.grouped(order, lengths, thresholds, self._kinds, self._weights, seed + 1)
        kernels.interleaved(
            order, documents, starts, lengths, most, steps, total, first_step, self._starts, self._mixes
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the curriculum depends on, as JSON values: with the step, it is its state."""
        return {"steps": self._steps, **self._settings.model_dump(mode="json")}


def kinds_of(split: StoreSplit) -> np.ndarray:
    """Genre and segment type of each sample as one number, uint8 [samples]: places in GENRES and SEGMENT_TYPES."""
    genres, segments = split.codes("genre", GENRES), split.codes("segment_type", SEGMENT_TYPES)
    return genres * np.uint8(len(SEGMENT_TYPES)) + segments


def curriculum_problems(section: Any) -> list[tuple[str, str]]:
    """What is wrong with a raw curriculum section, as (key, problem) pairs."""
    problems = []
    for key, valid in (("segment_weights", SEGMENT_TYPES), ("genre_weights", GENRES)):
        weights = section.get(key) if isinstance(section, dict) else None
        for name in weights if isinstance(weights, dict) else ():
            if name not in valid:
                problems.append((key, f"there is no '{name}'; {nearest(str(name), valid)}"))
    return problems
