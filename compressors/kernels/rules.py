"""What loops are told by numbers."""

from __future__ import annotations

from typing import NamedTuple


class AdamRule(NamedTuple):
    """How moments move a parameter: it is multiplied by `decay`, and then moved by ``-rate * direction``.

    ``direction = (momentum / first) / (sqrt(variance / second) + eps)``, at most `bound` in magnitude and, with
    `still`, 0 where the variance is.
    """

    rate: float
    decay: float
    first: float
    second: float
    eps: float
    bound: float
    still: bool
