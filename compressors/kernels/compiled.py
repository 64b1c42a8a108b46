"""How loops are compiled for CPUs."""

from __future__ import annotations

import numba
import numpy as np

compiled = numba.njit(cache=True, nogil=True)
reordered = numba.njit(cache=True, nogil=True, fastmath={"reassoc"})
CHUNK = 4096
"""Elements that a loop takes at a time, so that they are in the cache for the next."""


@compiled
def byte(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """The bits of a byte, the highest first; written out, for so it vectorises."""
    return np.uint8(a << 7 | b << 6 | c << 5 | d << 4 | e << 3 | f << 2 | g << 1 | h)
