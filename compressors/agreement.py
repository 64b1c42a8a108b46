"""Ranks compare what they must have in common before the first exchange.

Ranks with different settings or shapes would wait for each other without end, or add what does not belong together.
"""

from __future__ import annotations

from typing import Any

from compressors.exchange import Wire


def agree(settings: dict[str, Any], wire: Wire) -> None:
    """Raise ValueError, the same on all ranks, that names the first difference between ranks' `settings`."""
    if wire.ranks == 1:
        return
    every = wire.gather_if_different(settings, "settings")
    for rank, other in enumerate(every):
        difference = _difference(every[0], other, "")
        if difference:
            where, first, second = difference
            raise ValueError(
                f"ranks were given different settings: {where} is {first} on rank 0 and {second} on rank {rank}; "
                "wrap the same model with the same arguments on every rank"
            )


def _difference(first: Any, second: Any, where: str) -> tuple[str, Any, Any] | None:
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [*first, *(key for key in second if key not in first)]
        pairs = [(f"{where}.{key}".lstrip("."), first.get(key), second.get(key)) for key in keys]
    elif isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"number of {where}", len(first), len(second)
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(first, second, strict=True))]
    else:
        return (where, first, second) if first != second else None
    return next((found for name, a, b in pairs if (found := _difference(a, b, name))), None)
