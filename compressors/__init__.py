"""Gradient compression for Horovod.

>>> optimizer = compressors.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
...                                              compression=compressors.TopK(density=0.01))
"""

from compressors.codec import Codec, Compressor, Cooperative, Frame, Pattern
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
from compressors.onebit_adam import OneBitAdam
from compressors.optimizer import DistributedOptimizer
from compressors.policies import ErrorFeedback, Policies
from compressors.registry import available, get
from compressors.rehearsal import Rehearsal, rehearse
from compressors.topk_adam import TopKAdam

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "Codec",
    "Compressor",
    "Cooperative",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Frame",
    "Hierarchical",
    "NoCompression",
    "OneBit",
    "OneBitAdam",
    "Pattern",
    "Policies",
    "PowerSGD",
    "RandomK",
    "Rehearsal",
    "SparseRows",
    "TopK",
    "TopKAdam",
    "available",
    "get",
    "rehearse",
]
