"""Compiled loops against numpy and against the torch operations used on other devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compressors import kernels


@pytest.mark.parametrize("size", [1, 2, 7, 100, 5000, 300_000])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.2, 1.0])
def test_top_k_selects_the_largest_sampled_or_not(size, fraction):
    k = max(1, int(size * fraction))
    generator = torch.Generator().manual_seed(size)
    for values in (
        torch.randn(size, generator=generator),
        torch.randn(size, generator=generator) ** 7,
        torch.zeros(size),
        torch.randint(-3, 4, (size,), generator=generator).float(),
        torch.linspace(0, 1, size),
        (torch.arange(size) % 64 == 1).float(),
    ):
        indices = kernels.top_k(values, k, sampled=True)
        assert torch.equal(indices, kernels.top_k(values, k, sampled=False))
        assert torch.equal(indices, indices.unique())
        assert indices.numel() == k
        expected = np.sort(np.abs(values.numpy()))[size - k :]
        assert np.array_equal(np.sort(values[indices].abs().numpy()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_base", [False, True])
def test_add_scaled(dtype, with_base):
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    base = torch.linspace(-1, 1, 1000) if with_base else None
    out = torch.empty(1000)
    assert kernels.add_scaled(gradient, 0.125, base, out)
    assert torch.equal(out, gradient.float() * 0.125 + (base if with_base else 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 17, 999])
@pytest.mark.parametrize("with_base", [False, True])
def test_add_scaled_tells_what_is_not_finite(bad, position, with_base):
    gradient = torch.zeros(1000)
    gradient[position] = bad
    assert not kernels.add_scaled(gradient, 1.0, torch.zeros(1000) if with_base else None, torch.empty(1000))
    assert not kernels.all_finite(gradient)


def test_large_finite_values_are_finite():
    assert kernels.all_finite(torch.full((1000,), 3e38))
    assert kernels.add_scaled(torch.full((1000,), 3e38), 1.0, None, torch.empty(1000))
    assert not kernels.add_scaled(torch.full((9,), 1e300, dtype=torch.float64), 1.0, None, torch.empty(9))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
def test_signs_round_trip(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    bits = kernels.pack_signs(values)
    assert bits.tolist() == np.packbits(values.numpy() >= 0).tolist()
    sizes = (size // 3, size - size // 3)
    scales = torch.tensor([0.5, 2.0])
    total = torch.ones(size)
    kernels.add_signs(bits, scales, sizes, total)
    magnitudes = torch.cat([torch.full((n,), float(scale)) for n, scale in zip(sizes, scales, strict=True)])
    assert torch.equal(total, 1 + torch.where(values >= 0, magnitudes, -magnitudes))
