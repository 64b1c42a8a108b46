"""Gradient compression for Horovod.

>>> optimizer = compressors.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
...                                              compression=compressors.TopK(density=0.01))
"""

from compressors.codec import Codec, Frame, Pattern
from compressors.codecs.bf16 import BF16
from compressors.codecs.fp16 import FP16
from compressors.codecs.none import NoCompression
from compressors.codecs.onebit import OneBit
from compressors.codecs.topk import TopK
from compressors.optimizer import DistributedOptimizer
from compressors.registry import available, get

__all__ = [
    "BF16",
    "FP16",
    "Codec",
    "DistributedOptimizer",
    "Frame",
    "NoCompression",
    "OneBit",
    "Pattern",
    "TopK",
    "available",
    "get",
]
