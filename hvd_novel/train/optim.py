"""The optimizer with its parameter groups, its compression, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch

import compressors
from hvd_novel.config import CompressionConfig, OptimizerConfig, ScheduleConfig

_OURS = ("recheck_every", "warm_up")  # keys of a compression section that are no options of a compressor


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


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer called `config.name` over `parameter_groups`."""
    groups = parameter_groups(model, config)
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        # On CPUs the unfused kind takes four times as long, and six times where most gradients are zero (top-k).
        return torch.optim.AdamW(groups, **settings, fused=True)
    kind = {"onebit-adam": compressors.OneBitAdam, "topk-adam": compressors.TopKAdam}[config.name]
    return kind(groups, **settings, freeze_step=config.freeze_step)


def first_compressor(config: CompressionConfig) -> compressors.Compressor:
    """The compressor that a run begins with."""
    return compressors.get("none" if config.name == "auto" else config.name, **config.options)


def warm_up_compressor(config: CompressionConfig) -> compressors.Compressor | None:
    """What carries gradients before compression begins; None for float32."""
    return None if config.warm_up is None else compressors.get(config.warm_up)


def compression_problems(section: Any) -> list[tuple[str, str]]:
    """What is wrong with a raw compression section, as (key, problem) pairs."""
    if not isinstance(section, dict):
        return []
    options = {"name": "none"} | {key: value for key, value in section.items() if key not in _OURS}
    if options["name"] == "auto":
        return [(key, "auto takes no option but recheck_every") for key in options if key != "name"]
    try:
        compressors.get(**options)
    except (ValueError, TypeError) as error:
        return [("name", str(error))]
    return []


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
