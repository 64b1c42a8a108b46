"""Answers whether numbers are finite, put together: Python's own, or bool tensors [] on devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from compressors.kernels import Finite


def veto(answers: Sequence[Finite], device: torch.device) -> Tensor:
    """int32 [1] on `device`, for a sum over ranks: 1 if one of `answers` is no, else 0.

    Does not wait for a device. Answers may be tensors only where `device` is not a CPU, or they are on CPUs.
    """
    tensors = [answer for answer in answers if isinstance(answer, Tensor)]
    known = all(answer for answer in answers if not isinstance(answer, Tensor))
    if not tensors:
        return torch.full((1,), int(not known), dtype=torch.int32, device=device)
    return (~_joined(tensors, device).all(0, keepdim=True) | (not known)).int()


def holds(answers: Iterable[Finite]) -> bool:
    """Whether none of `answers` is no; waits for a device once, if at all."""
    tensors = []
    for answer in answers:
        if isinstance(answer, Tensor):
            tensors.append(answer)
        elif not answer:
            return False
    return not tensors or bool(_joined(tensors, home(answer.device for answer in tensors)).all())


def home(devices: Iterable[torch.device]) -> torch.device:
    """Where answers from `devices` come together: the first that is not a CPU, if there is one."""
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _joined(answers: Sequence[Tensor], device: torch.device) -> Tensor:
    assert device.type != "cpu" or all(answer.device == device for answer in answers), "it would have to wait"
    return torch.stack([answer.to(device, non_blocking=True) for answer in answers])
