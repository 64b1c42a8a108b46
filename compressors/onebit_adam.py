"""Adam whose momentum, not gradient, is compressed.

Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
algorithm 1; the automatic freeze point is the variance test of section 7.1 there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors import kernels

_STABLE = 0.96  # ratio of the variances' L1 norms over a window of 1 / (1 - beta2) steps


class MomentumOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that wants something else than gradients exchanged, once its `compressed` stage has begun."""

    exchanged = False
    """Whether ``.grad`` holds what was exchanged in that stage; if not, the gradient."""
    corrected: frozenset[Parameter] = frozenset()
    """Parameters whose momentum is made by the exchange (`TopK` with `momentum`), not here."""

    def attach(self, corrected: dict[Parameter, float], *, alone: bool) -> None:
        """Learn, from the wrapper, the exchange: momenta of the parameters that are corrected; whether there is none.

        Raises ValueError if this optimizer cannot work with such an exchange.
        """
        self.exchanged = not alone
        self.corrected = frozenset() if alone else frozenset(corrected)

    def weights(self, parameter: Parameter) -> Tensor | None:
        """By what magnitudes are multiplied before the largest entries are chosen; None for plain magnitudes."""
        return None

    @property
    @abstractmethod
    def compressed(self) -> bool:
        """Whether the compressed stage has begun; equal on all ranks."""

    @abstractmethod
    def outgoing(self, share: float) -> Callable[[Parameter, Tensor], Tensor]:
        """What this rank puts into the sum of this step in place of a parameter's unscaled gradient.

        `share` is this rank's part of what all ranks already have in common: 1 where ranks are averaged, 1 / ranks
        where they are summed.
        """

    @abstractmethod
    def stage_settings(self) -> dict[str, Any]:
        """What decides about the stage, as JSON values; must be equal on all ranks."""


class OneBitAdam(MomentumOptimizer):
    """AdamW for a while, then with frozen variance and momentum that is exchanged compressed.

    Give it to ``compressors.DistributedOptimizer`` with any compressor, usually `OneBit()`. Unwrapped, or on one
    rank, it is the same optimizer without compression.

    Dense stage, steps t = 1..T: gradients are averaged exactly and the step is AdamW's, with bias correction of both
    moments and decoupled weight decay. Compressed stage, t > T: each rank adds its own gradient to the common
    momentum, ``m_i = beta1 m + (1 - beta1) g_i``, and these are exchanged; the variance stays what it was, with the
    bias correction ``1 - beta2^T`` that it had, and the momentum's correction ``1 - beta1^t`` goes on, so that nothing
    jumps at the switch. Coordinates whose variance is zero at the freeze stay where they are (but for weight decay);
    no other moves further than Adam itself can, ``lr * max(1, (1 - beta1) / sqrt(1 - beta2))`` (Kingma and Ba 2015,
    section 2.1), whatever the codec made of its momentum.

    Clipping between ``synchronize()`` and ``step()``: exact in the dense stage. In the compressed stage ``.grad``
    holds the exchanged momentum, equal on all ranks, and its norm is what is clipped: the step is made from the
    clipped momentum, which is also the one remembered.

    Steps are counted for the whole optimizer: a skipped step does not count.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int | None = None,
    ) -> None:
        """`freeze_step`: the number T of dense steps, about 15 % of all and not less than the learning rate's warm-up.

        None freezes by itself: when the L1 norm of the variance has changed by less than 4 % in 1 / (1 - beta2)
        steps, and that many steps twice have passed. Raises ValueError for numbers out of range.
        """
        if lr < 0 or eps <= 0 or weight_decay < 0:
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative, eps={eps} positive")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), not {betas}")
        if freeze_step is not None and freeze_step < 1:
            raise ValueError(f"freeze_step must be at least 1, not {freeze_step}: the variance has to be known")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "freeze_step": freeze_step,
                "step": 0,
                "frozen_at": None,
                "variance_norms": [],
            },
        )

    @property
    def compressed(self) -> bool:
        return self.param_groups[0]["frozen_at"] is not None

    def outgoing(self, share: float) -> Callable[[Parameter, Tensor], Tensor]:
        beta1_of = {parameter: group["betas"][0] for group in self.param_groups for parameter in group["params"]}

        def local_momentum(parameter: Parameter, gradient: Tensor) -> Tensor:
            beta1, momentum = beta1_of[parameter], self._state_of(parameter)["exp_avg"]
            return (momentum * (beta1 * share)).add_(gradient, alpha=1 - beta1)

        return local_momentum

    def stage_settings(self) -> dict[str, Any]:
        keys = ("betas", "freeze_step", "frozen_at")
        return {"groups": [{key: group.get(key) for key in keys} for group in self.param_groups]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self._consider_freezing()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep their own type, which torch turns into the parameter's."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            for name, moment in state_dict["state"].get(key, {}).items():
                self.state[parameter][name] = moment.to(parameter.device, copy=True)

    def _update(self, parameter: Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ValueError("OneBitAdam takes dense gradients only: use sparse=False in embeddings")
        beta1, beta2 = group["betas"]
        state = self._state_of(parameter)
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        gradient = parameter.grad.to(momentum.dtype)
        if not self.compressed:
            momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        elif self.exchanged:
            momentum.copy_(gradient)
        else:
            momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        known = group["frozen_at"] or group["step"]
        rule = kernels.AdamRule(
            rate=group["lr"],
            decay=1 - group["lr"] * group["weight_decay"],
            first=1 - beta1 ** group["step"],
            second=1 - beta2**known,
            eps=group["eps"],
            bound=self._bound(parameter, group) if self.compressed else math.inf,
            still=self.compressed,
        )
        kernels.adam_step(parameter, momentum, variance, rule)

    def _bound(self, parameter: Parameter, group: dict[str, Any]) -> float:
        """How far, in learning rates, a compressed step may move an entry."""
        beta1, beta2 = group["betas"]
        return max(1.0, (1 - beta1) / math.sqrt(1 - beta2))

    def attach(self, corrected: dict[Parameter, float], *, alone: bool) -> None:
        if corrected:
            raise ValueError("OneBitAdam makes its own momentum: use TopK with momentum=0, or TopKAdam")
        super().attach(corrected, alone=alone)

    def _consider_freezing(self) -> None:
        """Freeze all groups at once. The variance, and so the answer, is the same on all ranks."""
        first = self.param_groups[0]
        if self.compressed:
            return
        if first["freeze_step"] is not None:
            freeze = first["step"] >= first["freeze_step"]
        else:
            freeze = self._variance_is_stable(first)
        if freeze:
            for group in self.param_groups:
                group["frozen_at"] = group["step"]
                group["variance_norms"] = []

    def _variance_is_stable(self, first: dict[str, Any]) -> bool:
        beta2 = first["betas"][1]
        window = math.ceil(1 / (1 - beta2))
        total = sum(float(state["exp_avg_sq"].sum()) for state in self.state.values())
        norms = [*first["variance_norms"], total / (1 - beta2 ** first["step"])][-window - 1 :]
        first["variance_norms"] = norms
        if first["step"] < 2 * window or norms[-1] == 0:
            return False
        return min(norms[0], norms[-1]) >= _STABLE * max(norms[0], norms[-1])

    def _state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        """Moments in float32, or float64 for float64 parameters."""
        state = self.state[parameter]
        if not state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        return state
