"""The plan: every token once an epoch, the same step at any number of replicas, equal cost, packs within their caps."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_novel.errors import UserError
from hvd_novel.sharding import dealing
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.packer import pack
from hvd_novel.sharding.plan import Plan, StepPlan
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.strategies import STRATEGIES

COST = Cost(9216.0, 1.0, 500.0)  # a model of hidden size 768
LENGTHS = (
    st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 99, 100, 101, 200])), min_size=1, max_size=80)
    .filter(any)
    .map(lambda values: np.array(values, np.int32))
)
CAPS = st.lists(st.integers(100, 400), min_size=1, max_size=6)


def make(lengths: np.ndarray, step_tokens: int = 500, seed: int = 0, **options: object) -> Plan:
    return Plan(lengths, np.ones(len(lengths), np.int32), seed=seed, step_tokens=step_tokens, **options)


def epoch_of(plan: Plan, caps: list[int], epoch: int = 0) -> list[StepPlan]:
    return [plan.step(epoch * plan.steps_per_epoch + index, caps) for index in range(plan.steps_per_epoch)]


def spans_of(step: StepPlan) -> list[Span]:
    return [span for packs in step.packs for spans in packs for span in spans]


def assert_partition(lengths: np.ndarray, steps: list[StepPlan]) -> None:
    """Every document is in one step, and its spans in that step cover it without gap or overlap."""
    assert sorted(d for step in steps for d in step.documents.tolist()) == list(range(len(lengths)))
    for step in steps:
        pieces = defaultdict(list)
        for span in spans_of(step):
            pieces[span.document].append((span.start, span.stop))
        assert sorted(pieces) == [d for d in step.documents.tolist() if lengths[d] > 0]
        for document, parts in pieces.items():
            parts.sort()
            assert (parts[0][0], parts[-1][1]) == (0, lengths[document])
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            assert all(start < stop for start, stop in parts)
        assert step.tokens == lengths[step.documents].sum() == sum(s.stop - s.start for s in spans_of(step))
        assert step.trained_tokens == np.maximum(lengths[step.documents] - 1, 0).sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(LENGTHS, st.integers(1, 2000), CAPS, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_an_epoch_trains_every_token_once(
    strategy: str, lengths: np.ndarray, budget: int, caps: list[int], epoch: int
) -> None:
    """Also with fewer documents than replicas, one document, empty ones, documents as long as a cap or one more."""
    plan = make(lengths, budget, strategy=strategy, cost=COST)
    steps = epoch_of(plan, caps, epoch)
    assert_partition(lengths, steps)
    for step in steps:
        assert step.epoch == epoch
        assert len(step.documents) > 0
        assert len(step.packs) == len(step.costs) == len(caps)
        for cap, packs, costs in zip(caps, step.packs, step.costs, strict=True):
            sizes = [np.array([span.stop - span.start for span in spans]) for spans in packs]
            assert all(0 < size.sum() <= cap for size in sizes)
            assert costs == pytest.approx([float(COST.of(size).sum()) for size in sizes])


@given(LENGTHS, st.integers(1, 2000), CAPS, st.sampled_from(["cost", "token", "random"]))
@settings(max_examples=50, deadline=None)
def test_the_same_documents_form_a_step_whatever_the_caps_costs_and_replicas(
    lengths: np.ndarray, budget: int, caps: list[int], strategy: str
) -> None:
    one, many = make(lengths, budget), make(lengths, budget, strategy=strategy, cost=COST)
    assert one.steps_per_epoch == many.steps_per_epoch
    for step in range(one.steps_per_epoch):
        alone, shared = one.step(step, [500]), many.step(step, caps)
        assert alone.documents.tolist() == shared.documents.tolist()
        assert (alone.tokens, alone.trained_tokens) == (shared.tokens, shared.trained_tokens)


@given(LENGTHS, st.integers(100, 900))
@settings(max_examples=50, deadline=None)
def test_packs_are_best_fit_decreasing(lengths: np.ndarray, capacity: int) -> None:
    """Against a plain search, and: best fit never leaves two packs that would fit into one."""
    packed = pack(np.arange(len(lengths)), lengths, [capacity])
    loads = [sum(span.stop - span.start for span in spans) for spans in packed.packs[0]]
    sizes = sorted((s.stop - s.start for spans in packed.packs[0] for s in spans), reverse=True)
    assert sorted(loads) == sorted(_best_fit(sizes, capacity))
    smallest = sorted(loads)[:2]
    assert len(loads) < 2 or sum(smallest) > capacity


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    loads: list[int] = []
    for size in sizes:
        fitting = [index for index, load in enumerate(loads) if load + size <= capacity]
        if fitting:
            loads[max(fitting, key=lambda index: loads[index])] += size
        else:
            loads.append(size)
    return loads


def long_tailed(count: int, seed: int = 1) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(np.log(1800), 1.0, count), 300, 32000).astype(np.int32)


@pytest.mark.parametrize("replicas", [8, 64])
@pytest.mark.parametrize("cap", [8192, 65536])
def test_every_step_costs_every_replica_the_same(replicas: int, cap: int) -> None:
    """At four packs a replica, within the bound that the costliest span sets; and far better than dealing at random."""
    step_tokens = int(0.95 * 4 * replicas * cap)
    lengths = long_tailed(min(4 * step_tokens // 2500, 150_000))
    ratios = {}
    for strategy in ("cost", "random"):
        plan = make(lengths, step_tokens, strategy=strategy, cost=COST)
        ratios[strategy] = []
        for step in (plan.step(index, [cap] * replicas) for index in range(min(plan.steps_per_epoch, 4))):
            loads = [sum(costs) for costs in step.costs]
            ratios[strategy].append(max(loads) / np.mean(loads))
            if strategy == "cost":
                costliest = COST.of(np.array([max(s.stop - s.start for s in spans_of(step))]))[0]
                assert ratios["cost"][-1] <= max(1.02, costliest / np.mean(loads))
    assert np.mean(ratios["cost"]) < 1.02 < 1.1 < np.mean(ratios["random"])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_exchanges_only_make_loads_more_even(weights: list[int], replicas: int) -> None:
    falling = np.sort(np.array(weights, np.float64))[::-1].copy()
    owners = dealing.longest_processing_time(falling, replicas)
    before = np.bincount(owners, falling, replicas)
    dealing.even_out(falling, owners, replicas)
    after = np.bincount(owners, falling, replicas)
    assert after.max() <= before.max()
    assert (owners >= 0).all()
    assert (owners < replicas).all()


def test_exchanges_balance_replicas_that_have_few_spans_each() -> None:
    """About six spans a replica, none of them small: dealing alone leaves the busiest 4 % above the mean and more."""
    generator = np.random.default_rng(2)
    for _ in range(20):
        weights = np.sort(generator.uniform(3000, 8192, 45))[::-1].copy()
        owners = dealing.longest_processing_time(weights, 8)
        dealt = np.bincount(owners, weights, 8)
        dealing.even_out(weights, owners, 8)
        exchanged = np.bincount(owners, weights, 8)
        assert exchanged.max() / exchanged.mean() < 1.006 < 1.02 < dealt.max() / dealt.mean()


def test_tokens_and_cost_are_balanced_by_different_strategies() -> None:
    lengths = long_tailed(4000)
    caps = [32000] * 8
    spread = {}
    for strategy in ("token", "cost"):
        step = make(lengths, 8 * 4 * 32000, strategy=strategy, cost=COST).step(0, caps)
        tokens = [sum(s.stop - s.start for spans in packs for s in spans) for packs in step.packs]
        costs = [sum(costs) for costs in step.costs]
        spread[strategy] = (max(tokens) / np.mean(tokens), max(costs) / np.mean(costs))
    assert spread["token"][0] < 1.005 < 1.01 < spread["cost"][0]
    assert spread["cost"][1] < 1.01 < 1.03 < spread["token"][1]


@pytest.mark.parametrize("strategy", ["cost", "greedy"])
def test_steps_are_random_samples_of_the_store(strategy: str) -> None:
    """The variance between steps of the mean log-length is that of random steps of their sizes."""
    lengths = long_tailed(60_000)
    plan = make(lengths, 8 * 4 * 8192, strategy=strategy, cost=COST)
    logs = np.log(lengths)
    means, sizes = [], []
    for epoch in range(3):
        for step in epoch_of(plan, [8192] * 8, epoch):
            means.append(logs[step.documents].mean())
            sizes.append(len(step.documents))
    assert len(means) > 1000
    # Steps are cut by tokens, so that those of long documents hold fewer: compare with a shuffle cut the same way.
    shuffled = []
    generator = np.random.default_rng(7)
    for _ in range(3):
        order = generator.permutation(len(lengths))
        ends = lengths[order].cumsum()
        bounds = np.searchsorted(ends, np.arange(1, plan.steps_per_epoch) * (ends[-1] / plan.steps_per_epoch))
        shuffled += [part.mean() for part in np.split(logs[order], bounds)]
    assert 0.8 < np.var(means) / np.var(shuffled) < 1.25


def test_step_sizes_stay_within_one_document_of_each_other() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 2000).astype(np.int32)
    sizes = [step.tokens for step in epoch_of(make(lengths, step_tokens=5000), [300])]
    assert max(sizes) - min(sizes) < 2 * 300
    assert abs(np.mean(sizes) - 5000) < 100


def test_a_giant_document_does_not_make_the_other_steps_larger() -> None:
    lengths = np.full(1000, 100, np.int32)
    lengths[3] = 50_000
    sizes = sorted(step.tokens for step in epoch_of(make(lengths, step_tokens=1000), [300]))
    assert sizes[-1] >= 50_000
    assert sizes[-2] <= 1100
    assert len(sizes) >= 99


def test_fewer_documents_than_replicas_leaves_some_without() -> None:
    plan = make(np.array([5, 6], np.int32))
    assert sorted(len(packs) for packs in plan.step(0, [10] * 4).packs) == [0, 0, 1, 1]


def test_documents_longer_than_the_smallest_cap_are_cut() -> None:
    plan = make(np.array([300, 301, 900], np.int32), step_tokens=2000)
    spans = spans_of(plan.step(0, [300, 500]))
    assert sorted(spans) == [(0, 0, 300), (1, 0, 300), (1, 300, 301), (2, 0, 300), (2, 300, 600), (2, 600, 900)]


def test_empty_documents_belong_to_steps_but_to_no_pack() -> None:
    lengths = np.array([0, 0, 7, 0, 5, 0], np.int32)
    for seed in range(6):
        steps = epoch_of(make(lengths, step_tokens=6, seed=seed), [8, 8])
        assert_partition(lengths, steps)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(3).integers(1, 300, 100).astype(np.int32)
    again, other, plan = make(lengths), make(lengths, seed=1), make(lengths)
    steps, caps = plan.steps_per_epoch, [300, 300]
    first = plan.step(3, caps)
    assert first == again.step(3, caps)
    later = plan.step(steps + 3, caps)
    assert plan.step(3, caps) == first, "jumping between epochs changes nothing"
    assert first.documents.tolist() not in (later.documents.tolist(), other.step(3, caps).documents.tolist())
    assert first.checksum != later.checksum


def test_a_plan_never_changes() -> None:
    """Pinned numbers: a resumed run must find the order that it began with, whatever was updated meanwhile."""
    lengths = (np.arange(200) * 7919 % 293).astype(np.int32)
    plan = make(lengths, 900, seed=5, cost=COST)
    steps = [plan.step(step, [200, 250, 300]) for step in (0, 7, plan.steps_per_epoch)]
    assert [step.checksum for step in steps] == [1017415, 360246, 816698]


def test_no_tokens_are_refused() -> None:
    for lengths in ([], [0, 0]):
        with pytest.raises(UserError, match="no training samples"):
            make(np.array(lengths, np.int32))


@pytest.mark.parametrize("caps", [[], [0], [100, -1]])
def test_caps_that_hold_nothing_are_refused(caps: list[int]) -> None:
    with pytest.raises(ValueError, match="caps must be positive"):
        make(np.array([5], np.int32)).step(0, caps)


def test_state_is_the_cost_in_force() -> None:
    lengths = long_tailed(500)
    plan, resumed = make(lengths, 50_000, cost=COST), make(lengths, 50_000, cost=TOKENS)
    resumed.load_state_dict(plan.state_dict())
    assert resumed.step(2, [8000] * 4).packs == plan.step(2, [8000] * 4).packs
