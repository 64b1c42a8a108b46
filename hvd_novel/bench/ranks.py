"""The ranks of benchmarks that exchange something."""

from __future__ import annotations

from hvd_novel import comm
from hvd_novel.errors import UserError


def several_ranks() -> comm.Topology:
    """Start Horovod. Raises UserError on a single rank."""
    topology = comm.init(deterministic=False)
    if topology.size == 1:
        raise UserError("one rank exchanges nothing: start this under a launcher with two ranks or more")
    return topology
