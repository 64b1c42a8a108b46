"""1-bit Adam: a dense stage that is AdamW, and a compressed one that stays equal, bounded and resumable."""

from __future__ import annotations

import copy
import itertools

import horovod.torch as hvd
import pytest
import torch
from torch.nn import Parameter

import compressors
from compressors.exchange import process_set

from .common import (
    assert_close,
    assert_equal,
    backward,
    gradients_of,
    make_parameters,
    must_be_the_same,
    owed_in_total,
    states_of_all_ranks,
    summed,
    wrap,
)

SHAPES = {"first": (40, 30), "bias": (30,), "last": (30, 40)}


def _adam(parameters: dict[str, Parameter], **options) -> compressors.OneBitAdam:
    """Two parameter groups, one of them with weight decay."""
    groups = [
        {"params": [parameters["first"], parameters["bias"]], "weight_decay": 0.1},
        {"params": [parameters["last"]]},
    ]
    return compressors.OneBitAdam(groups, **{"lr": 0.01, "betas": (0.9, 0.95), "freeze_step": 10, **options})


def _step(optimizer, parameters, step: int, gradients=None) -> None:
    optimizer.zero_grad()
    backward(parameters, gradients or gradients_of(hvd.rank(), step, parameters))
    optimizer.step()


def _half_zero(step: int, parameters) -> dict[str, torch.Tensor]:
    """Gradients whose even rows are zero up to step 30."""
    gradients = gradients_of(hvd.rank(), step, parameters)
    if step < 30:
        gradients["first"][::2] = 0
    return gradients


def check_200_steps():
    parameters = make_parameters(SHAPES)
    optimizer = wrap(parameters, compressors.OneBit(), _adam(parameters, weight_decay=0.0), min_numel=0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    start = parameters["first"].detach().clone()
    frozen = None
    for step in range(200):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        _step(optimizer, parameters, step, _half_zero(step, parameters))
        if step == 9:
            assert optimizer.compressed
            frozen = {name: optimizer.state[p]["exp_avg_sq"].clone() for name, p in parameters.items()}
        if step % 50 == 49:
            must_be_the_same(f"step {step}", parameters)
            must_be_the_same(f"momentum {step}", {n: optimizer.state[p]["exp_avg"] for n, p in parameters.items()})
        if step > 9:
            for name, p in parameters.items():
                assert float((p.detach() - before[name]).abs().max()) <= 0.01 * 1.001, f"{name}, step {step}"
    assert_equal({name: optimizer.state[p]["exp_avg_sq"] for name, p in parameters.items()}, frozen)
    assert torch.equal(parameters["first"].detach()[::2], start[::2]), "zero variance stays put"
    assert not torch.equal(parameters["first"].detach()[1::2], start[1::2])


def check_dense_stage_is_adamw():
    ours, plain = make_parameters(SHAPES), make_parameters(SHAPES)
    optimizer = wrap(ours, compressors.OneBit(), _adam(ours, freeze_step=100))
    reference = torch.optim.AdamW(
        [
            {"params": [plain["first"], plain["bias"]], "weight_decay": 0.1},
            {"params": [plain["last"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        _step(optimizer, ours, step)
        for name, total in summed(step, plain).items():
            plain[name].grad = (total / hvd.size()).float()
        reference.step()
    assert_close({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in plain.items()}, 1e-6)


def check_exact_exchange_equals_one_process():
    """With a codec that loses nothing, both stages are those of one process with the mean gradient."""
    for op, divisor in ((hvd.Average, hvd.size()), (hvd.Sum, 1)):
        ours, alone = make_parameters(SHAPES), make_parameters(SHAPES)
        optimizer = wrap(ours, compressors.get("none"), _adam(ours, freeze_step=3), op=op)
        reference = _adam(alone, freeze_step=3)
        for step in range(8):
            _step(optimizer, ours, step)
            for name, total in summed(step, alone).items():
                alone[name].grad = (total / divisor).float()
            reference.step()
        assert reference.compressed
        assert_close({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in alone.items()}, 1e-5)


def check_nothing_jumps_at_the_switch():
    """With the same gradient again and again, the first compressed step moves as the last dense one."""
    parameters = make_parameters(SHAPES)
    optimizer = wrap(parameters, compressors.get("none"), _adam(parameters, lr=1e-3, weight_decay=0.0))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    moves = []
    for _ in range(12):
        before = parameters["first"].detach().clone()
        _step(optimizer, parameters, 0)
        moves.append((parameters["first"].detach() - before) / 1e-3)
    assert optimizer.compressed
    for earlier, later in itertools.pairwise(moves):
        torch.testing.assert_close(earlier, later, rtol=0, atol=2e-3)


def check_resuming_is_going_on():
    def make():
        parameters = make_parameters(SHAPES)
        return parameters, wrap(parameters, compressors.OneBit(), _adam(parameters, freeze_step=4), min_numel=0)

    parameters, optimizer = make()
    for step in range(12):
        if step in (3, 8):
            saved = copy.deepcopy((optimizer.state_dict(), states_of_all_ranks(optimizer)))
            values = {name: p.detach().clone() for name, p in parameters.items()}
        _step(optimizer, parameters, step)
    resumed, again = make()
    for name, value in values.items():
        resumed[name].data.copy_(value)
    again.load_state_dict(saved[0])
    again.load_compression_state_dict(saved[1])
    for step in range(8, 12):
        _step(again, resumed, step)
    assert_equal({n: p.detach() for n, p in resumed.items()}, {n: p.detach() for n, p in parameters.items()})


def check_resizing_keeps_what_is_owed():
    """4 ranks, then 2, then 3, in the compressed stage, each going on from the states of the ranks before."""
    if hvd.size() < 4:
        return
    states, saved, values = [], None, None
    for members in (process_set(list(range(count))) for count in (4, 2, 3)):
        parameters = make_parameters(SHAPES)
        adam = _adam(parameters, freeze_step=2)
        optimizer = wrap(parameters, compressors.OneBit(), adam, process_set=members, min_numel=0)
        if members.included() and saved is not None:
            optimizer.load_state_dict(saved)
            optimizer.load_compression_state_dict(states)
            for name, value in values.items():
                parameters[name].data.copy_(value)
            assert optimizer.compressed
        now = states_of_all_ranks(optimizer)[: len(members.ranks)]
        if states:
            assert_close(owed_in_total(now, parameters), owed_in_total(states, parameters), 1e-6)
        if members.included():
            for step in range(4):
                _step(optimizer, parameters, step)
        states = states_of_all_ranks(optimizer)[: len(members.ranks)]
        assert any(state["owed"] for state in states)
        ends = hvd.allgather_object({name: p.detach() for name, p in parameters.items()})
        for other in ends[1 : len(members.ranks)]:
            assert_equal(other, ends[0])
        saved, values = hvd.allgather_object(optimizer.state_dict())[0], ends[0]


def check_a_poisoned_step_did_not_happen():
    for name in ("onebit", "none", "rows", "powersgd"):
        ends = []
        for poison in (False, True):
            parameters = make_parameters(SHAPES)
            optimizer = wrap(parameters, compressors.get(name), _adam(parameters, freeze_step=3), min_numel=0)
            for step in range(6):
                if poison and step in (1, 5):
                    gradients = gradients_of(hvd.rank(), 50, parameters)
                    if hvd.rank() == 0:
                        gradients["last"][3, 3] = float("nan")
                    _step(optimizer, parameters, 50, gradients)
                _step(optimizer, parameters, step)
            ends.append({key: p.detach() for key, p in parameters.items()})
            ends.append({key: optimizer.state[p]["exp_avg"] for key, p in parameters.items()})
        assert_equal(ends[2], ends[0])
        assert_equal(ends[3], ends[1])


def check_clipping_bounds_the_momentum():
    parameters = make_parameters(SHAPES)
    optimizer = wrap(parameters, compressors.OneBit(), _adam(parameters, freeze_step=2), min_numel=0)
    for step in range(6):
        optimizer.zero_grad()
        backward(parameters, gradients_of(hvd.rank(), step, parameters), 100.0 if step == 4 else 1.0)
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        must_be_the_same(f"norm {step}", {"norm": norm})
        with optimizer.skip_synchronize():
            optimizer.step()
        if step >= 2:
            moments = [optimizer.state[p]["exp_avg"].norm() for p in parameters.values()]
            assert float(torch.stack(moments).norm()) <= 1.0001
    must_be_the_same("end", parameters)


def check_loss_scale_and_loss_scaler():
    ends = []
    for scale in (1.0, 256.0):
        parameters = make_parameters(SHAPES)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        adam = _adam(parameters, freeze_step=2)
        optimizer = wrap(parameters, compressors.OneBit(), adam, scaler=scaler, min_numel=0)
        for step in range(5):
            optimizer.zero_grad()
            backward(parameters, gradients_of(hvd.rank(), step, parameters), scale)
            optimizer.synchronize()
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        ends.append({name: p.detach() for name, p in parameters.items()})
    assert_equal(ends[1], ends[0])


def check_it_freezes_by_itself():
    parameters = make_parameters(SHAPES)
    optimizer = wrap(parameters, compressors.OneBit(), _adam(parameters, freeze_step=None, betas=(0.8, 0.9)))
    frozen_at = None
    for step in range(60):
        growing = 1.0 if step > 15 else 0.1 * (step + 1)
        optimizer.zero_grad()
        backward(parameters, gradients_of(hvd.rank(), step, parameters), growing)
        optimizer.step()
        if optimizer.compressed and frozen_at is None:
            frozen_at = step + 1
    assert frozen_at is not None
    assert 22 <= frozen_at <= 60, f"froze at step {frozen_at}, while the variance was still growing"
    assert optimizer.param_groups[0]["frozen_at"] == frozen_at


def check_nonsense_is_refused():
    for options, message in (
        ({"freeze_step": 0}, "freeze_step"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"lr": -1}, "lr"),
    ):
        with pytest.raises(ValueError, match=message):
            _adam(make_parameters(SHAPES), **options)
