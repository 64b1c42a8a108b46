"""The algebra of one optimizer step.

loss = sum over all trained tokens of all ranks / the step's global token count, which the plan knows beforehand.
Each rank differentiates its own token sum divided by that one number, and gradients are *summed* over ranks: ranks
with unequal token counts and unequal numbers of packs give exactly the gradient of the whole step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hvd_novel.config import ComputeConfig
from hvd_novel.model.build import autocast, head, hidden_states
from hvd_novel.model.loss import IGNORE, cross_entropy_sum
from hvd_novel.sharding.cost import Measured
from hvd_novel.sharding.packing import Pack


@dataclass(frozen=True)
class StepResult:
    """What this rank saw of a step."""

    loss_sum: float
    """Sum of the losses of this rank's trained tokens, in nats."""
    grad_norm: float
    """Norm of the global gradient before clipping; equal on all ranks."""
    updated: bool
    """False if the gradient was not finite, so that the parameters stayed as they were."""
    packs: list[Measured]
    """How long each of this rank's packs took."""
    tokens: int
    """Tokens of this rank's packs."""
    trained_tokens: int
    """Those of their labels that are trained."""


def train_step(
    model: PreTrainedModel,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    packs: Iterable[Pack],
    *,
    trained_tokens: int,
    compute: ComputeConfig,
    clip_norm: float | None,
) -> StepResult:
    """Accumulate this rank's packs, reduce over ranks, clip, update.

    `optimizer` is a `compressors.DistributedOptimizer` that sums; `trained_tokens` is the step's count over all
    ranks. Ranks may hold different numbers of packs, also none.
    """
    optimizer.zero_grad()
    packs = list(packs)
    loss_sum, measured = _accumulate(model, optimizer, scaler, packs, trained_tokens, compute)
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    finite = bool(torch.isfinite(norm))
    if finite and clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    with optimizer.skip_synchronize():
        if finite or scaler.is_enabled():  # the scaler leaves out the step itself, and must see it to back off
            scaler.step(optimizer)
    scaler.update()
    labels = sum(int((pack.labels != IGNORE).sum()) for pack in packs)
    tokens = sum(len(pack.labels) for pack in packs)
    return StepResult(loss_sum, float(norm), finite, measured, tokens, labels)


def _accumulate(
    model: PreTrainedModel,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    packs: list[Pack],
    trained_tokens: int,
    compute: ComputeConfig,
) -> tuple[float, list[Measured]]:
    total = torch.zeros((), dtype=torch.float64)
    measured = []
    for index, pack in enumerate(packs):
        start = time.perf_counter()
        last = index == len(packs) - 1
        # Only the last backward pass communicates, bucket by bucket while it runs.
        with nullcontext() if last else optimizer.no_sync():
            loss = pack_loss(model, pack, compute)
            scaler.scale(loss / trained_tokens).backward()
        total += loss.detach().double().cpu()  # waits for the device
        squares = sum(length * length for length in pack.lengths)
        measured.append(Measured(len(pack.labels), squares, len(pack.spans), time.perf_counter() - start))
    return float(total), measured


def pack_loss(model: PreTrainedModel, pack: Pack, compute: ComputeConfig) -> torch.Tensor:
    """Sum of the losses of the trained tokens of `pack`, a scalar in nats."""
    with autocast(model.device, compute.precision):
        hidden = hidden_states(model, pack.model_inputs(model.device))
        return cross_entropy_sum(hidden, pack.labels.to(model.device), head(model), compute.loss_chunk_tokens)
