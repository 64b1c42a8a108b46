"""Run by every rank: an epoch and one step more of corpora that are hardly there, on real training steps.

Fewer documents than ranks, one document, empty ones, documents as long as a cap and one token longer. Ranks take the
same number of steps with the same loss and gradient; a rank that waited for another would hang.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hvd_novel import comm
from hvd_novel.bench.small_model import COMPUTE, small_model
from hvd_novel.corpus.store import StoreSplit, TokenStore
from hvd_novel.sharding.cost import from_model
from hvd_novel.sharding.packing import packs_of
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.strategies import STRATEGIES
from hvd_novel.train.step import train_step

CAP = 30
CORPORA = {
    "one document": [17],
    "one token": [1],
    "fewer documents than ranks": [12, 9],
    "empty documents": [0, 0, 7, 0, 25, 0],
    "as long as the cap": [30, 30],
    "one token longer": [31, 5],
    "much longer": [95],
}


class Documents:
    """A split with documents of given lengths, without a file."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int32)
        self.context = np.ones(len(lengths), np.int32)

    def input_ids(self, index: int) -> np.ndarray:
        return np.arange(self.lengths[index], dtype=np.int32) % 50

    def value(self, name: str, index: int) -> Any:
        assert name == "context"
        return 1


topology = comm.init(deterministic=False)
model, optimizer = small_model(TokenStore.open(Path(sys.argv[1])), width=8)
caps = [CAP] * topology.size
idle = 0
for name, lengths in CORPORA.items():
    split = Documents(lengths)
    for strategy in STRATEGIES:
        plan = Plan(
            split.lengths, split.context, seed=0, step_tokens=40, strategy=strategy, cost=from_model(model, CAP)
        )
        seen, trained = [], 0
        for step in range(plan.steps_per_epoch + 1):
            planned = plan.step(step, caps)
            mine = planned.packs[topology.replica]
            idle += not mine
            result = train_step(
                model,
                optimizer,
                torch.amp.GradScaler("cpu", enabled=False),
                packs_of(cast(StoreSplit, split), mine),
                trained_tokens=max(1, planned.trained_tokens),
                compute=COMPUTE,
                clip_norm=None,
            )
            loss, labels = comm.all_reduce_sum([result.accumulated.loss_sum, result.accumulated.trained_tokens], "loss")
            assert labels == planned.trained_tokens
            assert (loss > 0) == (labels > 0)
            trained += int(labels) if step < plan.steps_per_epoch else 0
            seen.append((loss, result.grad_norm))
        assert trained == sum(max(length - 1, 0) for length in lengths), (name, strategy)
        everywhere = comm.all_gather_object(seen, "seen")
        assert all(other == everywhere[0] for other in everywhere), (name, strategy)
assert sum(comm.all_gather_object(idle, "idle")) > 0, "some rank was meant to have nothing to do"
if topology.rank == 0:
    print(f"{len(CORPORA)} corpora trained on {topology.size} ranks")
comm.leave(0)
