"""The state of a run besides its weights, as plain tensors and numbers.

Optimizer tensors are keyed by parameter name, so that they do not depend on the order of groups; random states
are kept for every rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state as ``{parameter name}|{state name}``."""
    return {
        f"{name}|{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> None:
    """Undo `optimizer_tensors`: state tensors go to their parameter's device, except the step counters."""
    parameters = dict(model.named_parameters())
    for entry, value in tensors.items():
        name, key = entry.rsplit("|", 1)
        parameter = parameters[name]
        optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def group_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the parameter groups remember besides their parameters, as JSON values."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_group_numbers(optimizer: torch.optim.Optimizer, numbers: list[dict[str, Any]]) -> None:
    """Undo `group_numbers`."""
    for group, saved in zip(optimizer.param_groups, numbers, strict=True):
        group.update(saved)


def random_state() -> dict[str, torch.Tensor]:
    """This rank's random generators, uint8."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put the generators back to where `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Give `rank` random numbers of its own: equal ones would mean equal dropout masks on all ranks."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
