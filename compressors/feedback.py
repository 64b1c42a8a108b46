"""Error feedback: what a payload misses is added to the next step's values.

Seide et al. 2014, "1-bit stochastic gradient descent", section 3; Karimireddy et al. 2019, "Error feedback fixes
SignSGD", algorithm 2. With it, sum(decoded own payloads) + residual = sum(values) + initial residual.
"""

from __future__ import annotations

import torch


class Residual:
    """A float32 residual in two copies, so that a step that is not taken leaves it as it was."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.value = torch.zeros(numel, device=device)
        """What is owed after the last completed step."""
        self.draft = torch.zeros(numel, device=device)
        """What will be owed after the step under way; holds the step's values before they are encoded."""

    def commit(self) -> None:
        """The step under way is completed."""
        self.value, self.draft = self.draft, self.value
