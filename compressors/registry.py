"""Compressors by name.

Other packages add theirs by an entry point in the group ``compressors.plugins``: its name is the compressor's, its
value the subclass of `Compressor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from compressors.codec import Compressor
from compressors.codecs.bf16 import BF16
from compressors.codecs.fp16 import FP16
from compressors.codecs.int8 import QSGD
from compressors.codecs.none import NoCompression
from compressors.codecs.onebit import OneBit
from compressors.codecs.powersgd import PowerSGD
from compressors.codecs.randomk import RandomK
from compressors.codecs.rows import SparseRows
from compressors.codecs.topk import TopK
from compressors.hierarchy import Hierarchical
from compressors.policies import Policies

PLUGINS = "compressors.plugins"

_COMPRESSORS: dict[str, type[Compressor]] = {
    "none": NoCompression,
    "fp16": FP16,
    "bf16": BF16,
    "rows": SparseRows,
    "topk": TopK,
    "int8": QSGD,
    "onebit": OneBit,
    "powersgd": PowerSGD,
    "randomk": RandomK,
    "hierarchical": Hierarchical,
}


def available() -> list[str]:
    """Names that `get` knows."""
    return sorted({*_COMPRESSORS, *_plugins()})


def get(name: str, *, policies: Sequence[dict[str, Any]] = (), **options: Any) -> Compressor:
    """The compressor called `name`, to be given to ``DistributedOptimizer(compression=...)``.

    `policies`: other compressors for parameters whose name matches, such as
    ``[{"match": "*embed*", "name": "topk", "density": 0.01}, {"match": "*norm*", "name": "none"}]``; the first match
    counts. An option that is itself a compressor is given in the same way: ``outer={"name": "onebit"}``. Raises
    ValueError that lists the valid names, or says which options the compressor takes.
    """
    if policies:
        return Policies([_rule(**policy) for policy in policies], default=get(name, **options))
    plugins = _plugins()
    if name not in _COMPRESSORS and name not in plugins:
        raise ValueError(f"unknown compressor '{name}'; available: {', '.join(available())}")
    kind = _COMPRESSORS[name] if name in _COMPRESSORS else plugins[name].load()
    try:
        return kind(**{key: _built(value) for key, value in options.items()})
    except TypeError as error:
        raise ValueError(f"compressor '{name}': {error}") from error


def _built(option: Any) -> Any:
    return get(**option) if isinstance(option, dict) and "name" in option else option


def _rule(match: str | None = None, name: str | None = None, **options: Any) -> tuple[str, Compressor]:
    if match is None or name is None:
        raise ValueError("a policy needs 'match', a pattern of parameter names, and 'name', a compressor")
    return match, get(name, **options)


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGINS)}
