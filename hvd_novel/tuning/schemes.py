"""The schemes of compression that are compared, and which of them may be chosen without asking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "fp16": {"name": "fp16"},
    "int8": {"name": "int8"},
    "onebit": {"name": "onebit"},
    "topk 1 %": {"name": "topk", "density": 0.01, "values": "float16"},
    "powersgd 4": {"name": "powersgd", "rank": 4},
}
"""Settings of the configuration's section `compression`."""
DENSE = "none"
SAFE = ("none", "fp16", "int8")
"""What may be chosen automatically: they need no other optimizer or schedule, remember nothing from step to step, and
lose less than 1 % of validation loss against dense training (`hvd-novel bench convergence`; fp16 rounds to more bits
than int8). The most exact comes first."""
TIE = 0.01
"""Of a step's time: what is faster by no more than this is not worth losing exactness for."""


def choose(seconds: Mapping[str, float]) -> str:
    """The safe scheme to take, of those in `seconds` (of a step): the most exact of the fastest."""
    times = {name: seconds[name] for name in SAFE if name in seconds}
    fastest = min(times.values())
    return next(name for name, time in times.items() if time <= (1 + TIE) * fastest)
