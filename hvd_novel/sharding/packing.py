"""Packs: documents one behind another in one row, with what attention and loss need to keep them apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvd_novel.corpus.store import StoreSplit
from hvd_novel.model.build import pack_inputs
from hvd_novel.model.loss import IGNORE


@dataclass(frozen=True)
class Pack:
    """Documents packed without padding.

    `input_ids` and `labels` are int64 [tokens]. The label of a position is the token after it, or IGNORE where
    that token belongs to another document or is only context.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    lengths: list[int]
    documents: list[int]

    def pinned(self) -> Pack:
        """This pack in page-locked memory."""
        return replace(self, input_ids=self.input_ids.pin_memory(), labels=self.labels.pin_memory())

    def split(self, tokens: int) -> list[Pack]:
        """This pack in pieces of at most `tokens`, or of one document where that is longer; views, in its order."""
        bounds, size = [0], 0
        for index, length in enumerate(self.lengths):
            if size and size + length > tokens:
                bounds.append(index)
                size = 0
            size += length
        return [self._slice(a, b) for a, b in pairwise([*bounds, len(self.lengths)])]

    def _slice(self, first: int, last: int) -> Pack:
        tokens = slice(sum(self.lengths[:first]), sum(self.lengths[:last]))
        return Pack(self.input_ids[tokens], self.labels[tokens], self.lengths[first:last], self.documents[first:last])

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments for the model: ids and restarting positions [1, tokens], int32 cu_seqlens [documents + 1]."""
        return pack_inputs(self.input_ids, self.lengths, device)


def collate(split: StoreSplit, documents: list[int]) -> Pack:
    """Pack `documents` of `split` in the given order."""
    ids = [split.input_ids(document) for document in documents]
    labels = [_labels(tokens, int(split.context[document])) for tokens, document in zip(ids, documents, strict=True)]
    return Pack(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        labels=torch.from_numpy(np.concatenate(labels)),
        lengths=[len(tokens) for tokens in ids],
        documents=list(documents),
    )


def packs_of(split: StoreSplit, packs: list[list[int]]) -> Iterator[Pack]:
    """The packs of one replica's part of a plan, made one at a time."""
    return (collate(split, documents) for documents in packs)


def _labels(tokens: np.ndarray, context: int) -> np.ndarray:
    """Next tokens [length] int64; the last position and those that predict one of the `context` first have none."""
    labels = np.full(len(tokens), IGNORE, np.int64)
    first = max(context, 1)
    labels[first - 1 : -1] = tokens[first:]
    return labels
