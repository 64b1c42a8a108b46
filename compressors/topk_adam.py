"""Adam for top-k: frozen variance, and momentum made before the exchange.

`OneBitAdam`'s two stages (Tang et al. 2021) with the exchange of Lin et al. 2018, "Deep gradient compression", section
3.2, in the second. Entries are chosen by how far they would move a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from compressors import kernels
from compressors.onebit_adam import OneBitAdam


class TopKAdam(OneBitAdam):
    """AdamW for a while, then with frozen variance behind `TopK(density, momentum=beta1)`.

    Compressed stage: each rank makes momentum of its own gradients, ``u_i = beta1 u_i + (1 - beta1) g_i``, accumulates
    it, and sends the accumulated entries ``c`` that are largest in ``|c| / (sqrt(v) + eps)``; what was sent is
    forgotten in both. The step is ``-lr mean(c) / (sqrt(v) + eps)``: only the entries sent move. The momentum of the
    dense stage goes on in the first ``u_i``. Parameters that travel densely are treated as by `OneBitAdam`.

    Dense stage, freezing, weight decay, skipped steps, and the rule for clipping are `OneBitAdam`'s; coordinates whose
    variance is zero at the freeze stay where they are. There is no further bound: entries arrive in sums over many
    steps. Clipping in the compressed stage clips the norm of what is applied.
    """

    def attach(self, corrected: dict[Parameter, float], *, alone: bool) -> None:
        if not alone and not corrected:
            raise ValueError("TopKAdam needs compression=TopK(density, momentum=beta1)")
        for group in self.param_groups:
            for parameter in group["params"]:
                if corrected.get(parameter, group["betas"][0]) != group["betas"][0]:
                    raise ValueError(f"TopK's momentum must be TopKAdam's beta1, {group['betas'][0]}")
        super(OneBitAdam, self).attach(corrected, alone=alone)

    def outgoing(self, share: float) -> Callable[[Parameter, Tensor], Tensor]:
        group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        dense = super().outgoing(share)

        def own_part(parameter: Parameter, gradient: Tensor) -> Tensor:
            group = group_of[parameter]
            if parameter not in self.corrected or group["step"] == group["frozen_at"]:
                return dense(parameter, gradient)  # at the switch: the common momentum starts each rank's own
            return gradient * (1 - group["betas"][0])

        return own_part

    def weights(self, parameter: Parameter) -> Tensor | None:
        group = next(group for group in self.param_groups if any(other is parameter for other in group["params"]))
        variance = self._state_of(parameter)["exp_avg_sq"]
        return kernels.adam_weights(variance, 1 - group["betas"][1] ** group["frozen_at"], group["eps"])

    def _bound(self, parameter: Parameter, group: dict[str, Any]) -> float:
        return math.inf if parameter in self.corrected else super()._bound(parameter, group)
