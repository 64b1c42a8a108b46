"""Gradient compression for Horovod: drop-in arguments for its ``DistributedOptimizer``.

>>> optimizer = compressors.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
...                                              compression=compressors.get("fp16"))
"""

from compressors.optimizer import DistributedOptimizer
from compressors.registry import available, get

__all__ = ["DistributedOptimizer", "available", "get"]
