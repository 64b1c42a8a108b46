"""The cost model against figures worked out by hand, and what must hold for any figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import compressors
from compressors.rehearsal import Kind, Operation, Rehearsal, rehearse
from hvd_novel.tuning.model import Link, Work, break_even, messages, predict
from hvd_novel.tuning.schemes import SAFE, SCHEMES, choose

RATES = {Kind.ALL_REDUCE: 1e6, Kind.ALL_REDUCE_HALF: 5e5, Kind.ALL_GATHER: 2e6, Kind.ALL_TO_ALL: 4e6}
LINK = Link(ranks=4, round_seconds=0.0104, hop_seconds=0.0001, rates=RATES, overlap=0.5)


def exchange(*operations: Operation, coding: float = 0.0) -> Rehearsal:
    return Rehearsal(operations, sum(operation.bytes_sent for operation in operations), 0, coding)


def two_phase(early: int, late: int, back: int, coding: float) -> Rehearsal:
    """Two buckets there, one of them while backward runs, and two back."""
    return exchange(
        Operation(Kind.ALL_TO_ALL, 0, early, late=False),
        Operation(Kind.ALL_TO_ALL, 0, late, late=True),
        Operation(Kind.ALL_GATHER, 1, back // 2, late=True),
        Operation(Kind.ALL_GATHER, 1, back // 2, late=True),
        coding=coding,
    )


def test_a_two_phase_step_by_hand() -> None:
    # A round is 10 ms, and on 4 ranks 4 messages of 0.1 ms for an all-reduce, 2 for an all-gather, 3 for an all-to-all.
    assert LINK.fixed_seconds == pytest.approx(0.010)
    found = predict(Work(1.0, 0.3), LINK, two_phase(800_000, 400_000, 200_000, coding=0.05))
    # Horovod does not fuse the all-to-alls, and fuses the all-gathers: 2 rounds, 2 * 3 + 2 messages.
    latency = 2 * 0.010 + 8 * 0.0001
    transfer = 1_200_000 / 4e6 + 200_000 / 2e6
    assert found.wire == pytest.approx(latency + transfer)
    assert found.hidden == pytest.approx(0.5 * 800_000 / 4e6)
    assert found.seconds == pytest.approx(1.0 + 0.05 + latency + transfer - 0.1)
    assert found.bytes_sent == 1_400_000


def test_what_is_hidden_ends_with_the_backward_pass() -> None:
    dense = exchange(Operation(Kind.ALL_REDUCE, 0, 10**6, late=False), Operation(Kind.ALL_REDUCE, 0, 10**5, late=True))
    assert predict(Work(1.0, 0.3), LINK, dense).hidden == pytest.approx(0.5 * 0.3)
    assert predict(Work(1.0, 0.0), LINK, dense).hidden == 0


def test_more_ranks_take_more_messages() -> None:
    assert [messages(kind, 4096) for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL)] == [24, 12, 4095]
    moved = LINK.at(ranks=4096)
    assert moved.round_seconds == pytest.approx(0.010 + 24 * 0.0001)
    assert moved.fixed_seconds == pytest.approx(LINK.fixed_seconds)
    assert LINK.at(rate=7.0).rates == dict.fromkeys(Kind, 7.0)


def test_break_even_by_hand() -> None:
    link = Link.uniform(ranks=2, rate=1.0, latency=0.0)
    dense = exchange(Operation(Kind.ALL_REDUCE, 0, 1000, late=True))
    quarter = exchange(Operation(Kind.ALL_REDUCE, 0, 250, late=True), coding=0.5)
    assert break_even(Work(1.0, 0.0), link, dense, quarter) == pytest.approx(750 / 0.5)
    assert break_even(Work(1.0, 0.0), link, quarter, dense) == math.inf
    costly = exchange(Operation(Kind.ALL_REDUCE, 0, 1000, late=True), coding=0.5)
    assert break_even(Work(1.0, 0.0), link, dense, costly) == 0


counts = st.integers(0, 10**9)
seconds = st.floats(0, 10)
exchanges = st.builds(two_phase, counts, counts, counts, seconds) | st.builds(
    lambda early, late, coding: exchange(
        Operation(Kind.ALL_REDUCE, 0, early, late=False), Operation(Kind.ALL_REDUCE, 0, late, late=True), coding=coding
    ),
    counts,
    counts,
    seconds,
)
works = st.builds(lambda whole, part: Work(whole, whole * part), st.floats(0, 100), st.floats(0, 1))
links = st.builds(
    lambda ranks, latency, hop, overlap: Link(ranks, latency, hop, RATES, overlap),
    st.integers(2, 5000),
    st.floats(0, 1),
    st.floats(0, 1e-3),
    st.floats(0, 1),
)


@settings(deadline=None)
@given(works, links, exchanges, st.floats(1e3, 1e12), st.floats(1, 1e6))
def test_more_bandwidth_never_takes_longer(work: Work, link: Link, what: Rehearsal, rate: float, times: float) -> None:
    slow, fast = (predict(work, link.at(rate=each), what).seconds for each in (rate, rate * times))
    assert fast <= slow * (1 + 1e-12)
    assert fast >= work.seconds - work.overlapping


@settings(deadline=None)
@given(works, links, exchanges, exchanges)
def test_at_the_break_even_both_take_the_same(work: Work, link: Link, dense: Rehearsal, other: Rehearsal) -> None:
    rate = break_even(work, link, dense, other)

    def gap(rate: float) -> float:
        return predict(work, link.at(rate=rate), dense).seconds - predict(work, link.at(rate=rate), other).seconds

    scale = 1e-9 * (1 + work.seconds)
    if rate == math.inf:
        assert gap(1e300) > -scale
    elif rate == 0:
        assert all(gap(10.0**power) <= scale * 10 ** max(0, 10 - power) for power in range(0, 13))
    elif rate > 1:  # below, seconds are so many that rounding shows
        assert gap(rate) == pytest.approx(0, abs=scale * max(1, 1e10 / rate))
        assert gap(rate * 2) <= scale * max(1, 1e10 / rate)


@settings(deadline=None)
@given(st.fixed_dictionaries({name: st.floats(0.1, 10) for name in SAFE}))
def test_what_is_chosen_is_within_a_percent_of_the_fastest(times: dict[str, float]) -> None:
    chosen = choose(times)
    assert times[chosen] <= 1.01 * min(times.values())
    assert all(times[other] > 1.01 * min(times.values()) for other in SAFE[: SAFE.index(chosen)])


def model() -> list[tuple[str, Parameter]]:
    shapes = [(300, 41), (64,), (0, 5), (1000, 7), (3,), (40, 40)]
    return [(f"p{index}", Parameter(torch.zeros(shape))) for index, shape in enumerate(shapes)]


@pytest.mark.parametrize("scheme", SAFE)
@settings(deadline=None, max_examples=6)
@given(ranks=st.integers(2, 300))
def test_bytes_of_safe_schemes_at_any_number_of_ranks(scheme: str, ranks: int) -> None:
    found = rehearse(model(), compressors.get(**SCHEMES[scheme]), ranks, rounds=0)
    dense = 2 * (ranks - 1) / ranks * 4 * sum(parameter.numel() for _, parameter in model())
    nominal = {"none": 1.0, "fp16": 0.5, "int8": 0.25}[scheme] * dense
    assert sum(operation.bytes_sent for operation in found.operations) == found.bytes_sent
    # int8: a scale for each block, of which each slice of each tensor begins one, and what travels densely.
    extra = 8 * (ranks + 60) + 4 * 67 * 2 if scheme == "int8" else 0
    assert nominal - 1 <= found.bytes_sent <= nominal + extra + 30


@settings(deadline=None, max_examples=8)
@given(ranks=st.integers(3, 300))
def test_top_k_sends_no_more_on_more_ranks(ranks: int) -> None:
    parameters = [("matrix", Parameter(torch.zeros(200, 300)))]
    entries, bytes_of_one = 600, 8
    found = rehearse(parameters, compressors.TopK(0.01), ranks, rounds=0)
    # An owner keeps at least one entry, and rounds up; the vote on finite gradients takes 8.
    assert found.bytes_sent <= bytes_of_one * (2 * entries + ranks) + 8


def test_a_rehearsal_leaves_no_gradients_and_needs_others() -> None:
    parameters = model()
    rehearse(parameters, compressors.get("int8"), 3)
    assert all(parameter.grad is None for _, parameter in parameters)
    with pytest.raises(ValueError, match="two ranks or more"):
        rehearse(parameters, compressors.get("none"), 1)
    for compressor in (compressors.get("rows"), compressors.get("hierarchical", outer={"name": "onebit"})):
        with pytest.raises(ValueError, match="cannot be rehearsed"):
            rehearse(parameters, compressor, 4)
