"""Compressors by name.

Other packages add theirs by an entry point in the group ``compressors.plugins``: its name is the compressor's, its
value the subclass of `Codec`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from compressors.codec import Codec
from compressors.codecs.bf16 import BF16
from compressors.codecs.fp16 import FP16
from compressors.codecs.none import NoCompression
from compressors.codecs.onebit import OneBit
from compressors.codecs.topk import TopK

PLUGINS = "compressors.plugins"

_COMPRESSORS: dict[str, type[Codec]] = {
    "none": NoCompression,
    "fp16": FP16,
    "bf16": BF16,
    "topk": TopK,
    "onebit": OneBit,
}


def available() -> list[str]:
    """Names that `get` knows."""
    return sorted({*_COMPRESSORS, *_plugins()})


def get(name: str, **options: Any) -> Codec:
    """The compressor called `name`, to be given to ``DistributedOptimizer(compression=...)``.

    Raises ValueError that lists the valid names, or says which options the compressor takes.
    """
    plugins = _plugins()
    if name not in _COMPRESSORS and name not in plugins:
        raise ValueError(f"unknown compressor '{name}'; available: {', '.join(available())}")
    kind = _COMPRESSORS[name] if name in _COMPRESSORS else plugins[name].load()
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"compressor '{name}': {error}") from error


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGINS)}
