"""Answers whether numbers are finite, put together: numbers' own, or bool tensors on their devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from compressors.kernels import Finite


def veto(answers: Sequence[Finite]) -> Tensor:
    """int32 [1] for a sum over ranks: 1 if one of `answers` is no, else 0.

    Made on the device, without waiting for it, where answers are there.
    """
    tensors = [answer for answer in answers if isinstance(answer, Tensor)]
    known = all(answer for answer in answers if not isinstance(answer, Tensor))
    if not tensors:
        return torch.tensor([not known], dtype=torch.int32)
    return (~_on_one_device(tensors).all(0, keepdim=True) | (not known)).int()


def holds(answers: Iterable[Finite]) -> bool:
    """Whether none of `answers` is no; waits for the device, once."""
    tensors = []
    for answer in answers:
        if isinstance(answer, Tensor):
            tensors.append(answer)
        elif not answer:
            return False
    return not tensors or bool(_on_one_device(tensors).all())


def _on_one_device(answers: Sequence[Tensor]) -> Tensor:
    return torch.stack([answer.to(answers[0].device, non_blocking=True) for answer in answers])
