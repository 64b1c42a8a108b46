"""Compressors by name."""

from __future__ import annotations

from typing import Any

from horovod.torch.compression import Compression

_COMPRESSORS: dict[str, Any] = {"none": Compression.none, "fp16": Compression.fp16}


def available() -> list[str]:
    """Names that `get` knows."""
    return sorted(_COMPRESSORS)


def get(name: str) -> Any:
    """The compressor called `name`, to be given to ``DistributedOptimizer(compression=...)``.

    Raises ValueError that lists the valid names.
    """
    if name not in _COMPRESSORS:
        raise ValueError(f"unknown compressor '{name}'; available: {', '.join(available())}")
    return _COMPRESSORS[name]
