"""Compiles each kernel in Triton, as `parity` starts it, for a CUDA device that need not be there.

Prints how many there were; fails if one does not compile, fuses products with sums, or takes denormals for zero.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))
from compressors.kernels import gpu, gpu_topk
from tests.compressors import parity

TARGET = GPUTarget("cuda", 80, 32)
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
# Fused sums; flushed denormals; quotients that are not rounded to the nearest. Of floating-point numbers all.
REFUSED = re.compile(r"\bfma\.|\.ftz\b|\bdiv\.(?:full|approx)|\brcp\.|\bex2\.")
compiled: set[tuple[Any, ...]] = set()


def compile_instead(kernel: Any, programs: int, *arguments: Any) -> None:
    constants, signature = {}, {}
    for parameter, argument in zip(kernel.params, arguments, strict=True):
        is_one = isinstance(argument, int) and argument == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one:  # as Triton does
            constants[parameter.name], signature[parameter.name] = argument, "constexpr"
        elif isinstance(argument, torch.Tensor):
            signature[parameter.name] = POINTERS[argument.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(argument, float) else "i32"
    key = (kernel.fn.__name__, *signature.items(), *constants.items())
    if key in compiled:
        return
    compiled.add(key)
    source = ASTSource(kernel, signature, constexprs=constants)
    ptx = triton.compile(source, target=TARGET, options={"enable_fp_fusion": False}).asm["ptx"]
    refused = REFUSED.search(ptx)
    assert refused is None, f"{key} has {refused.group()}"


def main() -> None:
    cpu = torch.device("cpu")
    with mock.patch.object(gpu, "launch", compile_instead), mock.patch.object(gpu_topk, "launch", compile_instead):
        for case in parity.CASES.values():
            case(gpu, 1, cpu)
            case(gpu, 4097, cpu)
        gpu.clear_unless(torch.tensor(True), torch.zeros(9))
    kernels = {
        name
        for module in (gpu, gpu_topk)
        for name, kernel in vars(module).items()
        if isinstance(kernel, triton.JITFunction) and name not in called_by_kernels(module)
    }
    assert kernels == {key[0] for key in compiled}
    print(len(compiled))


def called_by_kernels(module: Any) -> set[str]:
    """Kernels' own functions: those that return something."""
    return {
        name
        for name, kernel in vars(module).items()
        if isinstance(kernel, triton.JITFunction) and re.search(r"^    return \S", kernel.src, re.MULTILINE)
    } | {"_store_signs"}


if __name__ == "__main__":
    main()
