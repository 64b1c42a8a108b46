"""Packs: labels shifted inside a document, masked at its end and for context, every token trained once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from hvd_novel.corpus.store import TokenStore
from hvd_novel.model.loss import IGNORE
from hvd_novel.sharding.packing import collate, packs_of
from hvd_novel.sharding.plan import Plan


def test_labels_are_the_next_token_or_none(store: Path) -> None:
    split = TokenStore.open(store).split("train")
    windows = [d for d in range(len(split)) if split.context[d] > 1]
    assert windows, "the store was meant to hold windows with context"
    documents = [0, windows[0], 1]
    pack = collate(split, documents)
    start = 0
    for document, length in zip(documents, pack.lengths, strict=True):
        ids, labels = pack.input_ids[start : start + length], pack.labels[start : start + length]
        context = int(split.context[document])
        assert torch.equal(ids, torch.from_numpy(split.input_ids(document).astype(np.int64)))
        assert labels[: context - 1].eq(IGNORE).all()
        assert torch.equal(labels[context - 1 : -1], ids[context:])
        assert labels[-1] == IGNORE, "the last token of a document must not predict the first of the next"
        start += length
    assert start == len(pack.input_ids)


def test_an_epoch_trains_every_token_of_the_corpus_once(store: Path) -> None:
    """Closes the account from the header's corpus tokens to the labels that reach the loss."""
    opened = TokenStore.open(store)
    split = opened.split("train")
    plan = Plan(split.lengths, split.trained_tokens, seed=1, step_tokens=3000)
    total = 0
    spans: dict[int, list[tuple[int, int]]] = {}
    table = split.columns()
    for step in range(plan.steps_per_epoch):
        planned = plan.step(step, [700, 700])
        labels = [pack.labels for packs in planned.packs for pack in packs_of(split, packs)]
        assert sum(int((label != IGNORE).sum()) for label in labels) == planned.trained_tokens
        total += planned.trained_tokens
        for document in planned.documents:
            novel = table["novel"][document].as_py()
            spans.setdefault(novel, []).append(
                (table["token_start"][document].as_py(), table["token_end"][document].as_py())
            )
    assert total == opened.header["counts"]["train"]["trained_tokens"]
    for pieces in spans.values():
        ordered = sorted(pieces)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), "no token twice"


def test_model_inputs_of_a_pack(store: Path) -> None:
    pack = collate(TokenStore.open(store).split("train"), [0, 1])
    inputs = pack.model_inputs(torch.device("cpu"))
    assert inputs["input_ids"].shape == (1, len(pack.input_ids))
    assert inputs["cu_seq_lens_q"].tolist() == [0, pack.lengths[0], sum(pack.lengths)]
    assert inputs["position_ids"][0].tolist() == [*range(pack.lengths[0]), *range(pack.lengths[1])]
