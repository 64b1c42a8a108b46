"""The algebra of one optimizer step.

loss = sum over all trained tokens of all ranks / the step's global token count, which the plan knows beforehand.
Each rank differentiates its own token sum divided by that one number, and gradients are *summed* over ranks: ranks
with unequal token counts and unequal numbers of packs give exactly the gradient of the whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hvd_novel.config import ComputeConfig
from hvd_novel.model.build import autocast, head, hidden_states
from hvd_novel.model.loss import IGNORE, cross_entropy_sum
from hvd_novel.sharding.cost import Measured
from hvd_novel.sharding.packing import Pack


class Accumulated(NamedTuple):
    """What this rank's packs of a step amount to."""

    loss_sum: float
    """Sum of the losses of their trained tokens, in nats."""
    packs: list[Measured]
    """How long each of them took."""
    tokens: int
    trained_tokens: int
    """Tokens whose labels are trained."""


Accumulate = Callable[[Iterable[Pack]], Accumulated]
"""Adds the gradients of packs to the parameters'."""


@dataclass(frozen=True)
class StepResult:
    """What this rank saw of a step."""

    accumulated: Accumulated
    grad_norm: float
    """Norm of the global gradient before clipping; equal on all ranks."""
    updated: bool
    """False if the gradient was not finite, so that the parameters stayed as they were."""


def train_step(
    model: PreTrainedModel,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    packs: Iterable[Pack],
    *,
    trained_tokens: int,
    compute: ComputeConfig,
    clip_norm: float | None,
    overlap: bool = True,
    within: Callable[[Accumulate, Iterable[Pack]], Accumulated] | None = None,
) -> StepResult:
    """Accumulate this rank's packs, reduce over ranks, clip, update.

    `optimizer` is a `compressors.DistributedOptimizer` that sums; `trained_tokens` is the step's count over all
    ranks. Ranks may hold different numbers of packs, also none; no pack is asked for before the one before it is
    through, or under way with `overlap`: then gradients travel while the last backward pass runs, otherwise after it.
    `within` calls the accumulation in its own way, see `MemoryBudget.run`; not with `overlap`.
    """
    assert not (overlap and within), "what has been sent cannot be done over"
    optimizer.zero_grad()

    def accumulate(packs: Iterable[Pack]) -> Accumulated:
        return _accumulate(model, optimizer, scaler, packs, trained_tokens, compute, overlap)

    accumulated = within(accumulate, packs) if within else accumulate(packs)
    optimizer.synchronize()
    return StepResult(accumulated, *update(optimizer, scaler, clip_norm))


def update(optimizer: Any, scaler: torch.amp.GradScaler, clip_norm: float | None) -> tuple[float, bool]:
    """Clip the gradients, which are the sums over ranks, and take the step: (norm before, whether it was taken)."""
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
    return float(norm), finite


def _accumulate(
    model: PreTrainedModel,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    packs: Iterable[Pack],
    trained_tokens: int,
    compute: ComputeConfig,
    overlap: bool,
) -> Accumulated:
    total = torch.zeros((), dtype=torch.float64)
    measured, tokens, trained = [], 0, 0
    for pack, last in _with_last(packs) if overlap else ((pack, False) for pack in packs):
        start = time.perf_counter()
        # Only the last backward pass communicates, bucket by bucket while it runs.
        with nullcontext() if last else optimizer.no_sync():
            loss = pack_loss(model, pack, compute)
            scaler.scale(loss / trained_tokens).backward()
        total += loss.detach().double().cpu()  # waits for the device
        squares = sum(length * length for length in pack.lengths)
        measured.append(Measured(len(pack.labels), squares, len(pack.spans), time.perf_counter() - start))
        tokens += len(pack.labels)
        trained += int((pack.labels != IGNORE).sum())
    return Accumulated(float(total), measured, tokens, trained)


def _with_last(packs: Iterable[Pack]) -> Iterator[tuple[Pack, bool]]:
    """Each pack, and whether it is the last one."""
    rest = iter(packs)
    pack = next(rest, None)
    while pack is not None:
        following = next(rest, None)
        yield pack, following is None
        pack = following


def pack_loss(model: PreTrainedModel, pack: Pack, compute: ComputeConfig) -> torch.Tensor:
    """Sum of the losses of the trained tokens of `pack`, a scalar in nats."""
    with autocast(model.device, compute.precision):
        hidden = hidden_states(model, pack.model_inputs(model.device))
        return cross_entropy_sum(
            hidden, pack.labels.to(model.device, non_blocking=True), head(model), compute.loss_chunk_tokens
        )
