"""Saving, resuming, and going on with another number of ranks."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch

import compressors
from compressors.exchange import process_set

from .common import (
    VARIANTS,
    assert_close,
    assert_equal,
    backward,
    exchange,
    gradients_of,
    make_parameters,
    owed_in_total,
    states_of_all_ranks,
    wrap,
)


def check_resuming_is_going_on():
    """Stopped after two steps and resumed from the states, bit for bit as without a stop."""
    for index, (name, make) in enumerate(VARIANTS.items()):
        through = _run(make, range(4))[0]
        parameters, state, optimizer_state, states = _run(make, range(2))
        again = {key: torch.nn.Parameter(p.detach().clone()) for key, p in parameters.items()}
        optimizer = wrap(again, make(), torch.optim.AdamW(list(again.values()), lr=0.01))
        optimizer.load_state_dict(optimizer_state)
        optimizer.load_compression_state_dict(state if index % 2 else states)
        for step in range(2, 4):
            _step(optimizer, again, step)
        assert_equal({key: p.detach() for key, p in again.items()}, {key: p.detach() for key, p in through.items()})
        assert optimizer.compression_state_dict()["steps"] == 4, name


def _run(make, steps):
    parameters = make_parameters()
    optimizer = wrap(parameters, make(), torch.optim.AdamW(list(parameters.values()), lr=0.01))
    for step in steps:
        _step(optimizer, parameters, step)
    states = optimizer.compression_state_dict()
    return parameters, states, copy.deepcopy(optimizer.state_dict()), states_of_all_ranks(optimizer)


def _step(optimizer, parameters, step: int) -> None:
    optimizer.zero_grad()
    backward(parameters, gradients_of(hvd.rank(), step, parameters))
    optimizer.step()


def check_a_state_is_a_copy():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.OneBit())
    exchange(optimizer, parameters, 0)
    saved = optimizer.compression_state_dict()
    kept = copy.deepcopy(saved["residuals"])
    exchange(optimizer, parameters, 1)
    exchange(optimizer, parameters, 2)
    assert_equal(saved["residuals"], kept)


def check_resizing_keeps_what_is_owed():
    """4 ranks, then 2, then 3: the sum over ranks of what is owed stays the same, for senders and owners."""
    if hvd.size() < 4:
        return
    sets = [process_set(list(range(count))) for count in (2, 3)]
    for make in (compressors.OneBit, lambda: compressors.TopK(0.05, exchange="two_phase")):
        parameters = make_parameters()
        optimizer = wrap(parameters, make())
        for step in range(3):
            exchange(optimizer, parameters, step)
        states = states_of_all_ranks(optimizer)
        owed = owed_in_total(states, parameters)
        assert any(state["owed"] for state in states)
        for members in sets:
            count = len(members.ranks)
            parameters = make_parameters()
            optimizer = wrap(parameters, make(), process_set=members)
            if members.included():
                optimizer.load_compression_state_dict(states)
            states = states_of_all_ranks(optimizer)[:count]
            assert_close(owed_in_total(states, parameters), owed, 1e-6)
            exchange(optimizer, parameters, 7)
            states = states_of_all_ranks(optimizer)[:count]
            owed = owed_in_total(states, parameters)


def check_changed_buckets_lose_nothing():
    if hvd.size() == 1:
        return
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.OneBit())
    for step in range(2):
        exchange(optimizer, parameters, step)
    before = states_of_all_ranks(optimizer)
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.OneBit(), bucket_bytes=4 * 1600)
    optimizer.load_compression_state_dict(before)
    assert_close(owed_in_total(states_of_all_ranks(optimizer), parameters), owed_in_total(before, parameters), 1e-6)


def check_unfit_states_are_refused():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.OneBit())
    state = optimizer.compression_state_dict()
    for spoilt, message in (
        ({**state, "version": 0}, "version"),
        ({**state, "ranks": hvd.size() + 1}, "list of all ranks' states"),
        ({**state, "residuals": {"other": torch.zeros(3)}}, "'other'"),
        ({**state, "residuals": {"weight": torch.zeros(3)}}, "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_compression_state_dict(spoilt)
