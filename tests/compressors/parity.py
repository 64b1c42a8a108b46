"""What each kernel makes of awkward values, by any of the paths: for comparing paths with the compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097)
AWKWARD = (0.0, -0.0, 1e-45, -1e-45, 1e-39, -1.1754942e-38, 1e-30, 3.4e38, -3.4e38, 0.5, -2.5)


def normal(size: int) -> Tensor:
    """float32 draws, with a few of AWKWARD among them."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    places = range(3, size, 97)
    values[3::97] = torch.tensor([AWKWARD[place % len(AWKWARD)] for place in places])
    return values


def four_tensors(size: int) -> tuple[int, ...]:
    """Sizes, one of them zero, that divide no block."""
    return (size // 3, 0, size // 7, size - size // 3 - size // 7)


def add_scaled(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    values = normal(size).clamp(-1e30, 1e30)  # sums in float32 would be infinite
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        source = values.to(dtype)
        if dtype == torch.bfloat16:  # whose denormals Triton's interpreter gets wrong
            source = source.masked_fill(source.abs() < torch.finfo(dtype).tiny, 0.0)
        for base in (None, values.flip(0).to(device)):
            out = torch.empty(size, device=device)
            total = path.add_scaled(source.to(device), 0.3, base, out)
            found += [out, torch.as_tensor(total, dtype=torch.float64)]
        path.add_scaled(source.to(device), 0.3, out, out)
        found.append(out)
    return found


def what_is_not_finite(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    found = []
    for bad in (float("nan"), float("inf"), -float("inf"))[: 3 if size else 0]:
        values, out = torch.zeros(size), torch.empty(size, device=device)
        values[size // 2] = bad
        found.append(torch.as_tensor(path.add_scaled(values.to(device), 1.0, None, out), dtype=torch.float64))
        bits = path.pack_signs(out)
        scales = torch.ones(4, device=device)
        path.take_signs(out, scales, four_tensors(size), bits)
        found += [bits, out]
    return found


def signs(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    values, sizes = normal(size).to(device), four_tensors(size)
    scales = torch.tensor([0.3, 7.0, 2.0, 1e-40], device=device)
    bits = path.pack_signs(values)
    taken = torch.full_like(bits, 255)
    path.take_signs(values, scales, sizes, taken)
    total, out = normal(size).to(device), torch.empty(size, device=device)
    path.add_signs(bits, scales, sizes, total)
    path.set_signs(bits, scales, sizes, out)
    return [bits, taken, values, total, out]


def loaded(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    values, sizes = normal(size).clamp(-10, 10), four_tensors(size)
    base, sent = values.flip(0).to(device), torch.tensor([0.3, 7.0, 0.0, 1e-40], device=device)
    bits = torch.full((-(-size // 8),), 255, dtype=torch.uint8, device=device)
    found = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        sources = [part.to(device) for part in values.to(dtype).split(list(sizes))]
        out = torch.empty(size, device=device)
        sums = path.load_signs(sources, 0.3, base, sent, out, bits)
        found += [out, bits.clone(), torch.as_tensor(sums, dtype=torch.float64)]
    return found


def magnitudes(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    values = normal(size).clamp(-10, 10)
    return [torch.as_tensor(path.magnitudes(values.to(device), four_tensors(size)), dtype=torch.float64)]


def levels(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    found = []
    for values in (normal(size), normal(size).clamp(-10, 10), torch.full((size,), -3e-40)):
        for seed, most in ((None, 127), (0, 127), (2**63 - 1, 127), (3 << 31, 5)):
            multiples = torch.empty(size, dtype=torch.int8, device=device)
            scales = path.quantise(values.to(device), four_tensors(size), most, seed, multiples)
            out = torch.empty(size, device=device)
            path.dequantise(multiples, scales, four_tensors(size), 1.0, out, add=False)
            added = normal(size).clamp(-10, 10).to(device)
            path.dequantise(multiples, scales, four_tensors(size), 0.3, added, add=True)
            found += [multiples, scales, out, added]
    return found


def largest(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    """Sampled from 4096 elements on: one sample that serves, and others that mislead."""
    draws = normal(size)
    several = [draws, draws.clamp(-1, 1)]  # a sample that serves; ties
    if size > 4000:
        several += [torch.zeros(size), (torch.arange(size) % 4 == 1).float()]  # nothing; all of it between samples
    wanted = (1, size // 4 + 1, size) if size else ()
    return [path.top_k(values.to(device), k, sampled=True) for values in several for k in wanted]


def scattered(path: ModuleType, size: int, device: torch.device) -> list[Tensor]:
    found = []
    for index_type, value_type in ((torch.int64, torch.float32), (torch.int32, torch.float16)):
        for factor in (-1.0, torch.tensor([0.3], device=device)):
            total, indices = normal(size).to(device), torch.arange(0, size, 3, device=device)
            added = path.gather(total, indices)
            path.scatter_add(indices.to(index_type), added.to(value_type), factor, total)
            found += [added, total]
    return found


CASES: dict[str, Callable[[ModuleType, int, torch.device], list[Tensor]]] = {
    case.__name__: case
    for case in (add_scaled, what_is_not_finite, signs, loaded, magnitudes, levels, largest, scattered)
}


def differences(path: ModuleType, name: str, size: int, device: torch.device) -> list[str]:
    """Where `path` on `device` and the compiled loops differ: bits, or more than 1e-6 in sums (float64)."""
    from compressors.kernels import cpu

    ours, theirs = CASES[name](cpu, size, torch.device("cpu")), CASES[name](path, size, device)
    pairs = [(ours, theirs.cpu()) for ours, theirs in zip(ours, theirs, strict=True)]
    return [f"{name}({size}) number {number}" for number, pair in enumerate(pairs) if not _same(*pair)]


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if ours.dtype == torch.float64:
        return torch.allclose(ours, theirs, rtol=1e-6, atol=0.0, equal_nan=True)
    both_nan = ours.isnan() & theirs.isnan()
    same_sign = ours.signbit() == theirs.signbit()
    return bool((both_nan | ((ours == theirs) & same_sign)).all())
