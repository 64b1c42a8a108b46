"""Adam's way from moments to parameters, in one compiled pass of one thread.

Results round as IEEE 754 has it; torch's own square roots on CPUs may be off in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from compressors.kernels import eager
from compressors.kernels.compiled import dividing
from compressors.kernels.rules import AdamRule


def adam_step(parameter: Tensor, momentum: Tensor, variance: Tensor, rule: AdamRule) -> None:
    arrays = _arrays(parameter, momentum, variance)
    if arrays is None:
        eager.adam_step(parameter, momentum, variance, rule)
        return
    number = arrays[0].dtype.type  # what loops compute in: Python's numbers would turn it into float64
    *numbers, still = rule
    _adam_step(tuple(arrays), tuple(number(each) for each in numbers), number(0), still)
    increment_version(parameter)  # as torch's operations do, so that autograd notices


def adam_weights(variance: Tensor, correction: float, eps: float) -> Tensor:
    arrays = _arrays(variance)
    if arrays is None:
        return eager.adam_weights(variance, correction, eps)
    weights = torch.empty(variance.shape, dtype=torch.float32)
    number = arrays[0].dtype.type
    _adam_weights(arrays[0], number(correction), number(eps), number(1), np.float32(0), weights.view(-1).numpy())
    return weights


def _arrays(*tensors: Tensor) -> list[Any] | None:
    """`tensors`, flat, if loops can be compiled for them."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64):
        return None
    if not all(each.dtype == dtype and each.is_contiguous() for each in tensors):
        return None
    return [each.detach().view(-1).numpy() for each in tensors]


@dividing
def _adam_step(tensors, numbers, zero, still):  # type: ignore[no-untyped-def]
    parameter, momentum, variance = tensors
    rate, decay, first, second, eps, bound = numbers
    for i in range(parameter.size):
        direction = momentum[i] / first / (np.sqrt(variance[i] / second) + eps)
        direction = bound if direction > bound else direction
        direction = -bound if direction < -bound else direction
        direction = zero if still and variance[i] == zero else direction
        parameter[i] = parameter[i] * decay - direction * rate


@dividing
def _adam_weights(variance, correction, eps, one, zero, weights):  # type: ignore[no-untyped-def]
    for i in range(variance.size):
        weight = one / (np.sqrt(variance[i] / correction) + eps)
        weights[i] = zero if variance[i] == zero else weight
