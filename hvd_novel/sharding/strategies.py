"""How the spans of a step go to replicas.

cost     longest processing time on modelled cost, then exchanges between replicas (the default): equal cost on every
         replica in every step
token    the same on tokens
random   documents one after another in the epoch's random order, each to the next replica: what a plain
         distributed sampler does
greedy   the sampler of load-aware articles: over the whole epoch each document to the replica with the fewest tokens
         so far, longest first; each replica then consumes its own documents in random order
"""

from __future__ import annotations

import numpy as np

from hvd_novel.sharding import dealing, kernels

STRATEGIES = ("cost", "token", "random", "greedy")


def greedy_owners(lengths: np.ndarray, replicas: int) -> np.ndarray:
    """The replica of each document, int32, for the strategy `greedy`."""
    longest_first = np.argsort(-lengths, kind="stable")
    owners = np.empty(len(lengths), np.int32)
    owners[longest_first] = dealing.longest_processing_time(lengths[longest_first].astype(np.float64), replicas)
    return owners


def consumed_together(order: np.ndarray, lengths: np.ndarray, owners: np.ndarray, replicas: int) -> None:
    """Rearrange `order` so that replicas come through their own documents, each in its order, at an equal pace."""
    progress = kernels.progress(order, lengths, owners, replicas)
    order[:] = order[np.argsort(progress, kind="stable")]
