"""What a launcher told this process; known before Horovod starts, and without importing it."""

from __future__ import annotations

import os

_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def launched() -> bool:
    """Whether a launcher started this process, as one rank of a job."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def launched_rank() -> int:
    """The rank that the launcher gave this process, 0 without one."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
