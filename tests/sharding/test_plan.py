"""The plan: every document once an epoch, the same step at any number of replicas, packs within their size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_novel.errors import UserError
from hvd_novel.sharding.plan import Plan, check_pack_size, deal, pack

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=120).map(lambda values: np.array(values, np.int32))


def make(lengths: np.ndarray, step_tokens: int = 500, seed: int = 0) -> Plan:
    return Plan(lengths, lengths - 1, seed=seed, step_tokens=step_tokens)


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_an_epoch_trains_every_document_once(lengths: np.ndarray, budget: int, replicas: int, epoch: int) -> None:
    plan = make(lengths, budget)
    steps = [plan.step(epoch * plan.steps_per_epoch + i, [300] * replicas) for i in range(plan.steps_per_epoch)]
    assert sorted(d for step in steps for d in step.documents) == list(range(len(lengths)))
    assert all(step.documents for step in steps)
    assert all(step.epoch == epoch for step in steps)
    assert sum(step.trained_tokens for step in steps) == int((lengths - 1).sum())


@given(LENGTHS, st.integers(1, 2000), st.integers(2, 7))
@settings(max_examples=50, deadline=None)
def test_the_same_documents_form_a_step_at_any_number_of_replicas(
    lengths: np.ndarray, budget: int, replicas: int
) -> None:
    plan = make(lengths, budget)
    for step in range(plan.steps_per_epoch):
        one, many = plan.step(step, [300]), plan.step(step, [300] * replicas)
        assert one.documents == many.documents
        assert one.trained_tokens == many.trained_tokens
        assert len(many.packs) == replicas


@given(LENGTHS, st.integers(300, 900))
@settings(max_examples=50, deadline=None)
def test_packs_hold_each_document_once_and_keep_their_size(lengths: np.ndarray, capacity: int) -> None:
    packs = pack(list(range(len(lengths))), lengths, capacity)
    assert sorted(d for documents in packs for d in documents) == list(range(len(lengths)))
    assert all(sum(lengths[documents]) <= capacity for documents in packs)
    # Best fit never leaves two packs that would fit into one.
    loads = sorted(int(sum(lengths[documents])) for documents in packs)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


def test_step_sizes_stay_within_one_document_of_each_other() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 2000)
    plan = make(lengths, step_tokens=5000)
    sizes = [int(lengths[plan.step(i, [300]).documents].sum()) for i in range(plan.steps_per_epoch)]
    assert max(sizes) - min(sizes) < 2 * 300
    assert abs(np.mean(sizes) - 5000) < 100


def test_dealing_is_balanced_and_independent_of_the_order_given() -> None:
    lengths = np.random.default_rng(2).integers(1, 300, 64)
    documents = np.arange(64)
    dealt = deal(documents, lengths, 4)
    loads = [int(lengths[mine].sum()) for mine in dealt]
    assert max(loads) - min(loads) <= 300
    assert dealt == deal(documents[::-1], lengths, 4)


def test_fewer_documents_than_replicas_leaves_some_without() -> None:
    plan = make(np.array([5, 6], np.int32))
    assert sorted(len(packs) for packs in plan.step(0, [300] * 4).packs) == [0, 0, 1, 1]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(3).integers(1, 300, 100)
    again, other = make(lengths), make(lengths, seed=1)
    plan = make(lengths)
    steps = plan.steps_per_epoch
    assert plan.step(3, [300, 300]) == again.step(3, [300, 300])
    plan.step(steps + 3, [300, 300])
    assert plan.step(3, [300, 300]) == again.step(3, [300, 300]), "jumping between epochs changes nothing"
    assert plan.step(3, [300, 300]).documents != plan.step(steps + 3, [300, 300]).documents
    assert plan.step(3, [300, 300]).documents != other.step(3, [300, 300]).documents


def test_a_document_longer_than_a_cap_is_refused() -> None:
    check_pack_size(np.array([300], np.int32), 300)
    with pytest.raises(UserError, match="301 tokens"):
        check_pack_size(np.array([301], np.int32), 300)
    with pytest.raises(ValueError, match="301 tokens"):
        make(np.array([301], np.int32)).step(0, [400, 300])


def test_no_documents_are_refused() -> None:
    with pytest.raises(UserError, match="no training samples"):
        make(np.array([], np.int32))
