"""Loss on a split, over all ranks, and the unigram model it is measured against."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hvd_novel import comm
from hvd_novel.config import ComputeConfig
from hvd_novel.corpus.store import StoreSplit
from hvd_novel.sharding.packer import pack
from hvd_novel.sharding.packing import packs_of
from hvd_novel.train.step import pack_loss


@dataclass(frozen=True)
class Evaluation:
    """Likelihood of the trained tokens of a split."""

    nats: float
    tokens: int
    characters: int
    seconds: float

    def record(self) -> dict[str, Any]:
        """The values of an ``eval`` record."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_token": loss / math.log(2),
            "bits_per_character": self.nats / math.log(2) / max(1, self.characters),
            "tokens": self.tokens,
            "characters": self.characters,
            "seconds": self.seconds,
        }


def evaluate(
    model: PreTrainedModel,
    split: StoreSplit,
    *,
    topology: comm.Topology,
    compute: ComputeConfig,
    pack_tokens: int,
    max_tokens: int | None,
) -> Evaluation:
    """Evaluate on `split`, or on its first samples up to about `max_tokens`; the same result on every rank.

    Every sample is counted once, whatever the number of ranks; one longer than a pack is cut. Draws no random numbers.
    """
    start = time.perf_counter()
    documents = _first(split.lengths, max_tokens)
    packed = pack(documents, split.lengths, [pack_tokens] * topology.replicas)
    training = model.training
    model.eval()
    nats = 0.0
    with torch.no_grad():
        for batch in packs_of(split, packed.packs[topology.replica]):
            nats += float(pack_loss(model, batch, compute))
    model.train(training)
    nats = comm.all_reduce_sum([nats], "evaluate")[0]
    return Evaluation(
        nats=nats,
        tokens=int(split.trained_tokens[documents].sum(dtype=np.int64)),
        characters=int(split.characters[documents].sum(dtype=np.int64)),
        seconds=time.perf_counter() - start,
    )


def unigram(train: StoreSplit, split: StoreSplit, vocab_size: int) -> Evaluation:
    """What token frequencies of `train` alone (one added to each) say about `split`: the bar to clear."""
    start = time.perf_counter()
    counts = _counts(train, vocab_size) + 1.0
    seen = _counts(split, vocab_size)
    return Evaluation(
        nats=float(-(seen * np.log(counts / counts.sum())).sum()),
        tokens=int(seen.sum()),
        characters=int(split.characters.sum(dtype=np.int64)),
        seconds=time.perf_counter() - start,
    )


def _first(lengths: np.ndarray, max_tokens: int | None) -> np.ndarray:
    if max_tokens is None:
        return np.arange(len(lengths))
    ends = lengths.cumsum(dtype=np.int64)
    return np.arange(min(len(lengths), int(np.searchsorted(ends, max_tokens)) + 1))


def _counts(split: StoreSplit, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.float64)
    for document in range(len(split)):
        trained = split.input_ids(document)[split.context[document] :]
        counts += np.bincount(trained, minlength=vocab_size)
    return counts
