"""How kernels in Triton are started."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any) -> None:
    """Start `programs` of a Triton `kernel`, on the device of its tensors, which must be contiguous."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors), "tensors must be contiguous"
    if programs:
        with torch.cuda.device_of(tensors[0]):
            kernel[(programs,)](*arguments, enable_fp_fusion=False)
