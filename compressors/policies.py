"""A compressor for each kind of layer, and error feedback for codecs that come without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from compressors.codec import Codec, Compressor


class Policies(Compressor):
    """Chooses the compressor by the parameter's name."""

    def __init__(self, rules: Sequence[tuple[str, Compressor]], default: Compressor) -> None:
        """`rules`: shell-style patterns (``*embed*``) and compressors.

        The first that matches a parameter's name counts; if none does, `default`.
        """
        self.rules = list(rules)
        self.default = default

    def for_parameter(self, name: str) -> Compressor:
        return next((chosen for pattern, chosen in self.rules if fnmatchcase(name, pattern)), self.default)

    def settings(self) -> dict[str, Any]:
        rules = [{"match": pattern, **chosen.settings()} for pattern, chosen in self.rules]
        return {**self.default.settings(), "policies": rules}


def ErrorFeedback(codec: Codec) -> Codec:  # noqa: N802
    """A copy of `codec` whose payloads' errors are kept and added to the next step's values.

    Codecs that are unbiased without become contractions with it, as error feedback needs. Raises ValueError for
    compressors that are not codecs.
    """
    if not isinstance(codec, Codec):
        raise ValueError(f"{codec!r} is not a codec: it cannot be given error feedback")
    with_feedback = copy.copy(codec)
    with_feedback.error_feedback = True
    return with_feedback
