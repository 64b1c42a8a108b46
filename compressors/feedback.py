"""Error feedback: what a payload misses is added to the next step's values.

Seide et al. 2014, "1-bit stochastic gradient descent", section 3; Karimireddy et al. 2019, "Error feedback fixes
SignSGD", algorithm 2. With it, sum(decoded own payloads) + residual = sum(values) + initial residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors import kernels


class Residual:
    """A float32 residual in two copies, so that a step that is not taken leaves it as it was."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._value = torch.zeros(numel, device=device)
        self.draft = torch.zeros(numel, device=device)
        """What will be owed after the step under way; holds the step's values before they are encoded."""

    @property
    def value(self) -> Tensor:
        """What is owed after the last completed step."""
        return self._value

    def commit(self) -> None:
        """The step under way is completed."""
        self._value, self.draft = self.draft, self._value


class SignResidual(Residual):
    """What is left of tensors, of `sizes`, of which signs times scales are sent.

    It is not computed until the next step's values are: that saves a pass over memory.
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        super().__init__(sum(sizes), device)
        self._sizes = sizes
        self._nothing = torch.zeros(len(sizes), device=device)
        self.sent = self._nothing
        """The scales of the signs that were sent of `before`."""
        self.draft_sent = self._nothing
        """The scales of the signs that the step under way sends of `draft`."""

    @property
    def before(self) -> Tensor:
        """What was to be sent in the last completed step."""
        return self._value

    @property
    def value(self) -> Tensor:
        if self.sent is not self._nothing:
            bits = torch.empty(-(-self._value.numel() // 8), dtype=torch.uint8, device=self._value.device)
            kernels.take_signs(self._value, self.sent, self._sizes, bits)
            self.sent = self._nothing
        return self._value

    def begin(self) -> None:
        """The draft will hold what is left, unless `draft_sent` is set."""
        self.draft_sent = self._nothing

    def commit(self) -> None:
        super().commit()
        self.sent, self.draft_sent = self.draft_sent, self._nothing
