"""What ``DistributedOptimizer`` cannot serve. All raise ValueError that says what would do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

from compressors.codec import Compressor
from compressors.codecs.bf16 import BF16
from compressors.codecs.fp16 import FP16
from compressors.codecs.int8 import QSGD
from compressors.onebit_adam import MomentumOptimizer


def check_compression(compression: Any) -> None:
    if not isinstance(compression, Compressor):
        raise ValueError(
            f"compression={compression!r} is not a compressor of this package; choose one by compressors.get(name)"
        )


def check_warm_up(warm_up: Any) -> None:
    if warm_up is not None and (not isinstance(warm_up, FP16 | BF16 | QSGD) or warm_up.error_feedback):
        raise ValueError(
            f"warm_up={warm_up!r} cannot carry gradients before compression begins: choose fp16, bf16 or int8 (without "
            "error feedback), or leave it out for float32"
        )


def check_dense_start(wrapped: Any, compressors: Iterable[Compressor]) -> None:
    """Whether one of `compressors`, which can wait, does: by itself or for the optimizer's second stage."""
    staged = isinstance(wrapped, MomentumOptimizer)
    if not any(staged or compressor.starts_dense(0) for compressor in compressors):
        raise ValueError(
            "warm_up has nothing to carry: it goes with OneBitAdam or TopKAdam and a compressor other than none, fp16, "
            "bf16 and rows, or with dense_steps of powersgd or topk (without momentum)"
        )


def check_parameters(wrapped: Any, known: set[Parameter]) -> None:
    """Horovod would silently leave the gradients of such parameters different on every rank."""
    for index, group in enumerate(wrapped.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter not in known:
                name = wrapped._parameter_names.get(parameter, f"number {position} of group {index}")
                raise ValueError(
                    f"parameter {name} was unfrozen or added after wrapping and would not be reduced; "
                    "call compressors.DistributedOptimizer again on the optimizer that holds it"
                )
