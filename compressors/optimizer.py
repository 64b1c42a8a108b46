"""Horovod's ``DistributedOptimizer`` with ``no_sync``.

What comes back is Horovod's own object: ``step``, ``synchronize``, ``skip_synchronize``, ``zero_grad`` and
``backward_passes_per_step`` keep their meaning. Added is a context in which backward passes only accumulate,
so that ranks may run different numbers of micro-batches inside one step.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod
import horovod.torch as hvd
import torch

SUPPORTED_HOROVOD = "0.28.1"


def DistributedOptimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """Wrap `optimizer` as ``horovod.torch.DistributedOptimizer`` does, with the same arguments.

    The result has one more method, ``no_sync()``. Raises RuntimeError for a Horovod release whose private
    counters this has not been checked against.
    """
    if horovod.__version__ != SUPPORTED_HOROVOD:
        raise RuntimeError(
            f"compressors supports Horovod {SUPPORTED_HOROVOD}, found {horovod.__version__}; "
            f"install horovod=={SUPPORTED_HOROVOD}"
        )
    wrapped = hvd.DistributedOptimizer(optimizer, *args, **kwargs)
    wrapped.no_sync = types.MethodType(_no_sync, wrapped)
    return wrapped


@contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    """Accumulate gradients without communicating.

    Any number of backward passes may run inside, a different one on each rank (also none). Afterwards either
    run one more backward pass outside, whose hooks send the sums while it goes on, or call ``synchronize()``,
    which sends what was not sent.
    """
    # Horovod's hooks count this down at each backward pass and communicate at zero.
    delays = self._allreduce_delay
    for parameter in delays:
        delays[parameter] = sys.maxsize
    try:
        yield
    finally:
        for parameter in delays:
            delays[parameter] = self.backward_passes_per_step
