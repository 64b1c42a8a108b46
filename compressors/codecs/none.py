"""No compression: what Horovod does by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.codec import Codec, Frame, Pattern

_HOROVOD_SUMS = (torch.float16, torch.float32, torch.float64)


class NoCompression(Codec):
    """All-reduce of each gradient in its own type, as stock Horovod does (which then fuses them as it likes).

    bfloat16, which Horovod cannot sum, travels as float32.
    """

    skips_small = False
    bucketed = False
    unscales = False

    def pattern(self, frame: Frame) -> Pattern:
        return Pattern.DENSE

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in _HOROVOD_SUMS else torch.float32

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        return payload.clone().view(torch.float32)

    def nbytes(self, frame: Frame) -> int:
        return 4 * frame.numel


class DenseBuckets(NoCompression):
    """As `NoCompression`, but many gradients to an operation: for the small parameters that others leave out.

    float16 and bfloat16 are summed as float32, which costs little here.
    """

    bucketed = True

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32
