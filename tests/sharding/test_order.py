"""The order of an epoch, found for single steps or laid out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_novel.sharding import kernels
from hvd_novel.sharding.order import KeyOrder
from hvd_novel.sharding.plan import epoch_seed


def make(lengths: np.ndarray, most: int, steps: int, seed: int = 1) -> KeyOrder:
    total, _ = kernels.weigh(lengths, most)
    return KeyOrder(lengths, seed=seed, most=most, steps=steps, total=total)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_single_steps_are_slices_of_the_whole_order(data: st.DataObject) -> None:
    """However many documents, empty ones among them, whatever the steps: settled or not, one and the same order."""
    count = data.draw(st.sampled_from([1, 2, 127, 128, 129, 1000, 5000]))
    longest = data.draw(st.sampled_from([1, 3, 500]))
    lengths = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, longest + 1, count).astype(np.int32)
    lengths[0] = longest
    most = data.draw(st.sampled_from([longest, max(1, longest // 2)]))
    total, largest = kernels.weigh(lengths, most)
    steps = data.draw(st.integers(1, max(1, total // largest)))
    order = make(lengths, most, steps, seed=data.draw(st.integers(0, 2**63 - 1)))
    whole = np.empty(count, np.int32)
    order.write(whole)
    assert sorted(whole) == list(range(count))
    bounds = kernels.step_bounds(whole, lengths, most, steps, total)
    cold = [order.documents(step) for step in range(steps)]
    memory = np.empty(count, np.int32)
    order.settle(lambda write: (write(memory), memory)[1])
    for step, documents in enumerate(cold):
        assert np.array_equal(documents, whole[bounds[step] : bounds[step + 1]])
        assert np.array_equal(documents, order.documents(step))


def test_orders_are_random() -> None:
    """Neighbours are unrelated, every place is as likely as any other, and epochs and seeds differ."""
    lengths = np.ones(20_000, np.int32)
    orders = []
    for seed in (epoch_seed(0, 0), epoch_seed(0, 1), epoch_seed(1, 0), epoch_seed(1, 1)):
        order = np.empty(len(lengths), np.int32)
        make(lengths, 1, 1, seed).write(order)
        orders.append(order)
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
        assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.03
        halves = np.bincount(np.arange(len(order)) * 16 // len(order), weights=order < len(order) // 2)
        assert abs(halves / (len(order) / 16) - 0.5).max() < 0.06
    for first in range(4):
        for second in range(first):
            assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 0.03


@pytest.mark.parametrize("count", [1, 128, 10_000])
def test_keys_are_a_bijection(count: int) -> None:
    keys = kernels._keys(np.arange(count, dtype=np.int32), np.uint32(7), np.uint32(2**31))
    assert len(np.unique(keys)) == count
