"""Packs: spans one behind another in one row, with what attention and loss need to keep them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvd_novel.corpus.store import StoreSplit
from hvd_novel.model.build import pack_inputs
from hvd_novel.model.loss import IGNORE
from hvd_novel.sharding.spans import Span


@dataclass(frozen=True)
class Pack:
    """Spans packed without padding.

    `input_ids` and `labels` are int64 [tokens]. The label of a position is the token after it in the stored sample,
    also where a span ends inside the sample; IGNORE where the sample ends, or that token is only context.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    spans: list[Span]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each span."""
        return [span.stop - span.start for span in self.spans]

    def pinned(self) -> Pack:
        """This pack in page-locked memory."""
        return replace(self, input_ids=self.input_ids.pin_memory(), labels=self.labels.pin_memory())

    def split(self, tokens: int) -> list[Pack]:
        """This pack in pieces of at most `tokens`, or of one span where that is longer; views, in its order."""
        bounds, size = [0], 0
        for index, length in enumerate(self.lengths):
            if size and size + length > tokens:
                bounds.append(index)
                size = 0
            size += length
        return [self._slice(a, b) for a, b in pairwise([*bounds, len(self.lengths)])]

    def _slice(self, first: int, last: int) -> Pack:
        tokens = slice(sum(self.lengths[:first]), sum(self.lengths[:last]))
        return Pack(self.input_ids[tokens], self.labels[tokens], self.spans[first:last])

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments for the model: ids and restarting positions [1, tokens], int32 cu_seqlens [spans + 1]."""
        return pack_inputs(self.input_ids, self.lengths, device)


def collate(split: StoreSplit, spans: Sequence[Span]) -> Pack:
    """Pack `spans` of `split` in the given order; positions restart at each. Raises ValueError for an empty one."""
    if not spans or any(span.start >= span.stop for span in spans):
        raise ValueError(f"a pack needs spans, and each of them tokens: {list(spans)}")
    ids = [split.input_ids(span.document) for span in spans]
    return Pack(
        input_ids=torch.from_numpy(
            np.concatenate([i[s.start : s.stop] for i, s in zip(ids, spans, strict=True)]).astype(np.int64)
        ),
        labels=torch.from_numpy(
            np.concatenate([_labels(i, s, split.value("context", s.document)) for i, s in zip(ids, spans, strict=True)])
        ),
        spans=list(spans),
    )


def packs_of(split: StoreSplit, packs: list[list[Span]]) -> Iterator[Pack]:
    """The packs of one replica's part of a plan, made one at a time."""
    return (collate(split, spans) for spans in packs)


def _labels(tokens: np.ndarray, span: Span, context: int) -> np.ndarray:
    """Next tokens [span] int64 of a sample's `tokens`; those that predict one of the `context` first have none."""
    labels = np.full(span.stop - span.start, IGNORE, np.int64)
    first = max(context, 1, span.start + 1)  # the first token that this span predicts
    following = tokens[first : span.stop + 1]
    labels[first - 1 - span.start :][: len(following)] = following
    return labels
