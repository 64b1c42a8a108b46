"""Compiled loops against numpy and against the torch operations used on other devices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compressors import kernels
from compressors.kernels import cpu, eager


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
        assert torch.equal(indices, eager.top_k(values, k, sampled=True))
        expected = np.sort(np.abs(values.numpy()))[size - k :]
        assert np.array_equal(np.sort(values[indices].abs().numpy()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_base", [False, True])
def test_add_scaled(dtype, with_base):
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    base = torch.linspace(-1, 1, 1000) if with_base else None
    out = torch.empty(1000)
    total = kernels.add_scaled(gradient, 0.125, base, out)
    assert total == pytest.approx(float(out.double().abs().sum()), rel=1e-6)
    assert torch.equal(out, gradient.float() * 0.125 + (base if with_base else 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 17, 999])
@pytest.mark.parametrize("with_base", [False, True])
def test_add_scaled_tells_what_is_not_finite(bad, position, with_base):
    gradient = torch.zeros(1000)
    gradient[position] = bad
    base = torch.zeros(1000) if with_base else None
    assert not math.isfinite(kernels.add_scaled(gradient, 1.0, base, torch.empty(1000)))
    assert not kernels.all_finite(gradient)


def test_large_finite_values_are_finite():
    assert kernels.all_finite(torch.full((1000,), 3e38))
    out = torch.empty(9)
    kernels.add_scaled(torch.full((9,), 3e38), 1.0, None, out)
    assert kernels.all_finite(out)
    assert math.isinf(kernels.add_scaled(torch.full((9,), 1e300, dtype=torch.float64), 1.0, None, out))


SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 5000]


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    """The compiled loops, and the operations that take their place on other devices."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_path", lambda values: eager)


def test_add_scaled_to_its_base(path):
    out = torch.tensor([1.0, -2.0, 3.0])
    assert float(kernels.add_scaled(torch.tensor([4.0, 6.0, -2.0]), 0.5, out, out)) == 6
    assert out.tolist() == [3, 1, 2]


def _three_tensors(size: int) -> tuple[int, ...]:
    return (size // 3, size // 7, size - size // 3 - size // 7)


def _normal(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_signs(size, path):
    values, sizes, scales = _normal(size), _three_tensors(size), torch.tensor([0.5, 2.0, 0.0])
    bits = kernels.pack_signs(values)
    assert bits.tolist() == np.packbits(values.numpy() >= 0).tolist()
    each = torch.cat([torch.full((n,), float(scale)) for n, scale in zip(sizes, scales, strict=True)])
    signed = torch.where(values >= 0, each, -each)

    total, out = torch.ones(size), torch.full((size,), 7.0)
    kernels.add_signs(bits, scales, sizes, total)
    kernels.set_signs(bits, scales, sizes, out)
    assert torch.equal(total, 1 + signed)
    assert torch.equal(out, signed)

    left, taken = values.clone(), torch.full_like(bits, 255)
    kernels.take_signs(left, scales, sizes, taken)
    assert torch.equal(taken, bits)
    assert torch.equal(left, values - signed)


@pytest.mark.parametrize("size", SIZES)
def test_signs_of_a_sum(size, path):
    sizes, base, sent = _three_tensors(size), _normal(size), torch.tensor([0.25, 1.0, 0.0])
    parts = [(torch.tensor([1.0, rank, 0.5]), kernels.pack_signs(_normal(size).roll(rank))) for rank in range(1, 4)]
    expected = base.clone()
    kernels.take_signs(expected, sent, sizes, torch.empty(-(-size // 8), dtype=torch.uint8))
    for scales, bits in parts:
        kernels.add_signs(bits, scales, sizes, expected)
    out, bits = torch.full((size,), 7.0), torch.full((-(-size // 8),), 255, dtype=torch.uint8)
    sums = kernels.merge_signs(parts, base, sent, sizes, out, bits)
    assert torch.equal(out, expected)
    assert torch.equal(bits, kernels.pack_signs(expected))
    magnitudes = torch.as_tensor(kernels.magnitudes(expected, sizes))
    assert torch.as_tensor(sums).tolist() == pytest.approx(magnitudes.tolist(), rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_signs_to_tensors_apart(size):
    sizes, scales = _three_tensors(size), torch.tensor([0.5, 2.0, 0.0])
    bits, joined = kernels.pack_signs(_normal(size)), torch.full((size,), 7.0)
    apart = [torch.full((part,), 7.0) for part in sizes]
    kernels.set_signs(bits, scales, sizes, joined)
    kernels.scatter_signs(bits, scales, apart)
    assert torch.equal(torch.cat(apart), joined)


@pytest.mark.parametrize("size", SIZES)
def test_magnitudes(size, path):
    values, sizes = _normal(size), _three_tensors(size)
    expected = [float(part.double().abs().sum()) for part in values.split(list(sizes))]
    found = torch.as_tensor(kernels.magnitudes(values, sizes), dtype=torch.float64)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_scatter_add(path):
    total = torch.ones(10)
    kernels.scatter_add(torch.tensor([1, 7], dtype=torch.int32), torch.tensor([2.0, -3.0]).half(), 0.5, total)
    assert total.tolist() == [1, 2, 1, 1, 1, 1, 1, -0.5, 1, 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1])
def test_levels_are_the_same_on_every_device(size, seed):
    values, sizes = _normal(size), _three_tensors(size)
    found = []
    for path in (cpu, eager):
        multiples = torch.empty(size, dtype=torch.int8)
        scales = path.quantise(values, sizes, 127, seed, multiples)
        out = torch.full((size,), 7.0)
        path.dequantise(multiples, scales, sizes, 1.0, out, add=False)
        found += [(multiples, scales, out)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    step = eager.per_element(found[0][1], sizes)
    error = (found[0][2] - values).abs()
    assert bool((error <= step * (0.5001 if seed is None else 1.0001)).all())


def test_draws_are_even_and_differ_by_seed():
    values = torch.zeros(100_000)
    one, other = eager.draws(values, 1), eager.draws(values, 2**40 + 1)
    for draws in (one, other):
        assert 0 <= float(draws.min()) < 1e-3 < 0.999 < float(draws.max()) < 1
        assert float(draws.mean()) == pytest.approx(0.5, abs=0.005)
        assert float(draws.var()) == pytest.approx(1 / 12, abs=0.002)
        assert abs(float(torch.corrcoef(torch.stack([draws[1:], draws[:-1]]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.02


def _rule(bound: float, *, still: bool) -> kernels.AdamRule:
    return kernels.AdamRule(rate=0.01, decay=0.999, first=0.9, second=0.05, eps=1e-8, bound=bound, still=still)


def _moments(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    parameter, momentum, root = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    variance = root**2
    variance[::3] = 0
    return parameter, momentum, variance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bound", "still"), [(math.inf, False), (1.5, True), (math.inf, True)])
@pytest.mark.parametrize("shape", [(0,), (1,), (1003,), (17, 31)])
def test_adam_step_is_the_one_of_torch(shape, dtype, bound, still):
    parameter, momentum, variance = _moments(shape, dtype)
    expected, before = parameter.clone(), momentum.clone()
    eager.adam_step(expected, momentum, variance, _rule(bound, still=still))
    kernels.adam_step(parameter, momentum, variance, _rule(bound, still=still))
    assert torch.allclose(parameter, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(momentum, before)


def test_adam_step_is_the_formula(path):
    parameter = torch.tensor([1.0, 1.0, 1.0, 1.0])
    momentum, variance = torch.tensor([0.9, -90.0, 0.9, 0.0]), torch.tensor([0.05, 0.05, 0.0, 0.2])
    kernels.adam_step(parameter, momentum, variance, _rule(2.0, still=True))
    assert parameter.tolist() == pytest.approx([0.999 - 0.01, 0.999 + 0.02, 0.999, 0.999])


def test_adam_step_spreads_what_is_not_a_number(path):
    parameter = torch.zeros(5)
    momentum = torch.tensor([0.0, math.nan, 0.0, math.inf, 1.0])
    kernels.adam_step(parameter, momentum, torch.ones(5), _rule(1.0, still=True))
    assert parameter.isnan().tolist() == [False, True, False, False, False]


def test_adam_step_takes_what_loops_cannot(path):
    parameter, momentum, variance = _moments((40, 30))
    expected = parameter.clone()
    kernels.adam_step(expected, momentum, variance, _rule(1.5, still=True))
    apart = [each.t().contiguous().t() for each in (parameter, momentum, variance)]
    kernels.adam_step(*apart, _rule(1.5, still=True))
    assert torch.allclose(apart[0], expected, rtol=1e-6, atol=1e-7)
    half = parameter.bfloat16()
    kernels.adam_step(half, momentum, variance, _rule(1.5, still=True))
    assert torch.allclose(half.float(), expected, rtol=0.02, atol=0.02)


def test_autograd_notices_an_adam_step():
    parameter = torch.nn.Parameter(torch.ones(9))
    loss = (parameter**2).sum()
    with torch.no_grad():
        kernels.adam_step(parameter, torch.ones(9), torch.ones(9), _rule(1.0, still=False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1003,), (17, 31)])
def test_adam_weights_are_those_of_torch(shape, dtype):
    variance = _moments(shape, dtype)[2]
    weights = kernels.adam_weights(variance, 0.05, 1e-8)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, eager.adam_weights(variance, 0.05, 1e-8), rtol=1e-6)
    assert torch.equal(weights == 0, variance == 0)
