"""The cost model: found again from noisy times, never worse than tokens, untouched by times that mean nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hvd_novel.sharding.cost import TOKENS, Cost, CostModel, Measured, best_fit, from_model

TRUE = Cost(3e-6, 2e-10, 4e-4)
INITIAL = Cost(9216.0, 1.0, 0.0)


def measurements(count: int = 300, noise: float = 0.05, seed: int = 0) -> list[Measured]:
    """Packs of up to 16k tokens of log-normal spans, with times as TRUE would have them, give or take."""
    generator = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        lengths = np.clip(generator.lognormal(7, 1.2, 40), 50, 16384).astype(np.int64)
        lengths = lengths[lengths.cumsum() <= 16384]
        if len(lengths):
            seconds = TRUE.of(lengths).sum() * generator.lognormal(0, noise)
            packs.append(Measured(int(lengths.sum()), int((lengths**2).sum()), len(lengths), float(seconds)))
    return packs


def worst_error(cost: Cost) -> float:
    """Relative error for spans of many lengths, after scaling: only ratios matter to the plan."""
    lengths = np.array([100, 1000, 4000, 8000, 16000])
    ratios = cost.of(lengths) / TRUE.of(lengths)
    return float(ratios.max() / ratios.min() - 1)


def test_coefficients_are_found_again() -> None:
    fitted = best_fit(measurements(noise=0.0), INITIAL)
    assert fitted is not None
    assert fitted == pytest.approx(TRUE, rel=1e-6)
    noisy = best_fit(measurements(), INITIAL)
    assert noisy is not None
    assert worst_error(noisy) < 0.1 < worst_error(INITIAL)


def test_a_tenth_of_wild_times_changes_little() -> None:
    packs = measurements()
    generator = np.random.default_rng(1)
    for index in range(0, len(packs), 10):
        wild = [math.nan, math.inf, -1.0, 0.0, packs[index].seconds * 50][int(generator.integers(5))]
        packs[index] = packs[index]._replace(seconds=wild)
    fitted = best_fit(packs, INITIAL)
    assert fitted is not None
    assert worst_error(fitted) < 0.15


def test_no_coefficient_is_negative_or_infinite() -> None:
    generator = np.random.default_rng(2)
    for _ in range(20):
        packs = [pack._replace(seconds=float(generator.exponential())) for pack in measurements(40)]
        fitted = best_fit(packs, INITIAL)
        assert fitted is not None
        assert all(math.isfinite(value) and value >= 0 for value in fitted)
        assert sum(fitted) > 0
        assert error(packs, fitted) <= error(packs, scaled(packs, TOKENS)) + 1e-12


def test_times_that_only_tokens_explain_give_tokens() -> None:
    packs = [pack._replace(seconds=pack.tokens * 1e-6) for pack in measurements()]
    fitted = best_fit(packs, INITIAL)
    assert fitted is not None
    assert fitted.linear == pytest.approx(1e-6)
    assert fitted.of(np.array([10_000]))[0] == pytest.approx(1e-2, rel=1e-3)


def test_packs_that_are_all_alike_are_survived() -> None:
    fitted = best_fit([Measured(1000, 1_000_000, 1, 0.5)] * 50, INITIAL)
    assert fitted is not None
    assert fitted.of(np.array([1000]))[0] == pytest.approx(0.5)


def test_full_packs_leave_the_balance_of_tokens_to_the_model() -> None:
    """Packs of equal tokens and noisy times say nothing about what a token costs more than a span."""
    generator = np.random.default_rng(4)
    lengths = np.array([256] * 16)
    for _ in range(20):
        packs = []
        for _ in range(60):
            count = int(generator.integers(14, 17))
            tokens = 4096 + int(generator.integers(-30, 1))
            seconds = float(TRUE.of(lengths).sum() * generator.lognormal(0, 0.2))
            packs.append(Measured(tokens, tokens * 256, count, seconds))
        fitted = best_fit(packs, INITIAL)
        assert fitted is not None
        ratio = fitted.of(np.array([512]))[0] / fitted.of(np.array([128]))[0]
        assert 2.5 < ratio < 6, "about four times the tokens, about four times the cost"


def test_too_few_times_change_nothing() -> None:
    model = CostModel(INITIAL, 10)
    assert model.refit(measurements(10)) == INITIAL
    assert model.refit([Measured(100, 10_000, 1, math.nan)] * 1000) == INITIAL


def error(packs: list[Measured], cost: Cost) -> float:
    rows = np.array(packs)
    return float(np.median(np.abs(rows[:, :3] @ np.array(cost) / rows[:, 3] - 1)))


def scaled(packs: list[Measured], cost: Cost) -> Cost:
    rows = np.array(packs)
    factor = 1 / np.median(rows[:, :3] @ np.array(cost) / rows[:, 3])
    return Cost(*(factor * value for value in cost))


def test_warm_up_and_the_pack_that_sends_gradients_are_not_measured() -> None:
    model = CostModel(INITIAL, 100)
    packs = measurements(5)
    for _ in range(3):
        model.observe(packs)
    assert model.measured == []
    model.observe(packs)
    model.observe(packs[:1])
    assert model.measured == [*packs[:-1], packs[0]]


def test_fits_come_at_declared_steps() -> None:
    assert [step for step in range(1, 500) if CostModel(INITIAL, 200).due(step)] == [50, 200, 400]
    assert [step for step in range(1, 100) if CostModel(INITIAL, 30).due(step)] == [30, 60, 90]
    never = CostModel(INITIAL, 0)
    never.observe(measurements(5))
    assert not any(never.due(step) for step in range(500))
    for _ in range(10):
        never.observe(measurements(5))
    assert never.measured == []


def cost_of(name: str, longest: int = 4096, **keys: object) -> Cost:
    config = AutoConfig.for_model(name, vocab_size=1000, **keys)
    with torch.device("meta"):
        return from_model(AutoModelForCausalLM.from_config(config), longest)


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def test_first_coefficients_are_the_flops_of_the_model() -> None:
    layer = 4 * 64 * 64 + 3 * 64 * 128  # query, key, value, output; gate, up, down
    expected = Cost(6.0 * (4 * layer + 1000 * 64), 6.0 * 4 * 64, 0.0)
    assert cost_of("llama", **SIZES) == expected
    assert cost_of("llama", tie_word_embeddings=True, **SIZES) == expected
    gpt2 = cost_of("gpt2", n_embd=64, n_layer=4, n_head=4)
    assert gpt2 == Cost(6.0 * (4 * 12 * 64 * 64 + 1000 * 64), 6.0 * 4 * 64, 0.0)
    linear = 6.0 * 4 * 12 * 64 * 64
    assert linear / gpt2.quadratic == 12 * 64, "attention catches up at twelve times the hidden size"


def test_a_sliding_window_makes_attention_linear() -> None:
    full = cost_of("mistral", sliding_window=None, **SIZES)
    wide = cost_of("mistral", sliding_window=4096, **SIZES)
    narrow = cost_of("mistral", sliding_window=256, **SIZES)
    assert full == wide
    assert narrow.quadratic == 0.0
    pairs = sum(min(i + 1, 256) for i in range(4096))
    extra = (narrow.linear - full.linear) * 4096
    assert extra == pytest.approx(12.0 * 4 * 64 * pairs, rel=0.01)
    half = cost_of("qwen2", sliding_window=256, use_sliding_window=True, max_window_layers=2, **SIZES)
    assert half.quadratic == full.quadratic / 2
    assert cost_of("qwen2", sliding_window=256, use_sliding_window=False, **SIZES).quadratic == full.quadratic
