"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch

from hvd_novel.config import OptimizerConfig, ScheduleConfig


def parameter_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Three groups with their own weight decay: matrices, embeddings, and norms with biases.

    An output layer tied to the embedding counts as embedding. Empty groups are left out.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups: dict[str, list[torch.nn.Parameter]] = {"matrices": [], "embeddings": [], "norms": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = "embeddings" if id(parameter) in embeddings else "norms" if parameter.ndim < 2 else "matrices"
        groups[kind].append(parameter)
    decay = {
        "matrices": config.weight_decay,
        "embeddings": config.embedding_weight_decay,
        "norms": config.norm_weight_decay,
    }
    return [
        {"name": kind, "params": parameters, "weight_decay": decay[kind]}
        for kind, parameters in groups.items()
        if parameters
    ]


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`."""
    return torch.optim.AdamW(parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up to `peak`, then a cosine to `min_lr_ratio * peak`.

    The last step, `schedule.steps - 1`, runs at the minimum.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    span = max(1, schedule.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    floor = peak * schedule.min_lr_ratio
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
