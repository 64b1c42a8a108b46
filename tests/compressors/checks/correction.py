"""Momentum correction and masking, and the Adam that is made for them."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch

import compressors

from .common import (
    assert_close,
    assert_equal,
    backward,
    gradients_of,
    make_parameters,
    must_be_the_same,
    states_of_all_ranks,
    summed,
    wrap,
)

SHAPES = {"first": (40, 30), "bias": (30,), "last": (30, 40)}


def _adam(parameters, **options):
    return compressors.TopKAdam(
        list(parameters.values()), **{"lr": 0.01, "betas": (0.9, 0.95), "freeze_step": 4, **options}
    )


def _topk(density: float = 0.05, **options):
    return compressors.TopK(density, momentum=0.9, **options)


def _step(optimizer, parameters, step: int, gradients=None) -> None:
    optimizer.zero_grad()
    backward(parameters, gradients or gradients_of(hvd.rank(), step, parameters))
    optimizer.step()


def check_at_full_density_it_is_momentum_sgd():
    for exchange in ("auto", "two_phase"):
        ours, plain = make_parameters(SHAPES), make_parameters(SHAPES)
        optimizer = wrap(
            {name: p for name, p in ours.items() if name != "bias"},
            _topk(1.0, exchange=exchange),
            torch.optim.SGD([ours["first"], ours["last"]], lr=0.1),
        )
        reference = torch.optim.SGD([plain["first"], plain["last"]], lr=0.1, momentum=0.9)
        for step in range(5):
            _step(optimizer, ours, step)
            for name, total in summed(step, plain).items():
                plain[name].grad = (total / hvd.size()).float()
            reference.step()
        names = ("first", "last")
        assert_close({n: ours[n].detach() for n in names}, {n: plain[n].detach() for n in names}, 1e-5)


def check_momentum_is_forgotten_where_it_was_sent():
    if hvd.size() == 1:
        return
    parameters = make_parameters({"weight": (64, 64)})
    optimizer = wrap(parameters, _topk(exchange="all_gather"))
    for step in range(3):
        _step(optimizer, parameters, step)
    state = optimizer.compression_state_dict()
    sent = state["residuals"]["weight"] == 0
    assert int(sent.sum()) == 205
    assert torch.equal(state["momenta"]["weight"] == 0, sent)


def check_poisoned_steps_and_resuming():
    def plain(parameters):
        return torch.optim.SGD(list(parameters.values()), lr=0.1)

    for make in (plain, _adam):
        through = None
        for disturbed in (False, True):
            parameters = make_parameters(SHAPES)
            optimizer = wrap(parameters, _topk(), make(parameters), min_numel=0)
            for step in range(9):
                if disturbed and step in (2, 4, 6):
                    gradients = gradients_of(hvd.rank(), 50, parameters)
                    if hvd.rank() == hvd.size() - 1:
                        gradients["last"][3, 3] = float("inf")
                    _step(optimizer, parameters, 50, gradients)
                if disturbed and step == 7:
                    saved = copy.deepcopy((optimizer.state_dict(), states_of_all_ranks(optimizer)))
                    parameters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
                    optimizer = wrap(parameters, _topk(), make(parameters), min_numel=0)
                    optimizer.load_state_dict(saved[0])
                    optimizer.load_compression_state_dict(saved[1])
                _step(optimizer, parameters, step)
            values = {name: p.detach() for name, p in parameters.items()}
            must_be_the_same(f"{make.__name__}, {disturbed}", values)
            through = through or values
        assert_equal(values, through)


def check_adam_at_full_density_is_adam_with_frozen_variance():
    for op, divisor in ((hvd.Average, hvd.size()), (hvd.Sum, 1)):
        ours, alone = make_parameters(SHAPES), make_parameters(SHAPES)
        optimizer = wrap(ours, _topk(1.0), _adam(ours), op=op)
        reference = _adam(alone)
        if hvd.size() > 1:
            reference.corrected = frozenset([alone["first"], alone["last"]])  # those are not bounded
        for step in range(9):
            _step(optimizer, ours, step)
            for name, total in summed(step, alone).items():
                alone[name].grad = (total / divisor).float()
            reference.step()
        assert reference.compressed
        assert_close({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in alone.items()}, 1e-5)


def check_adam_sends_what_moves_most_and_leaves_zero_variance_alone():
    parameters = make_parameters(SHAPES)
    start = parameters["first"].detach().clone()
    optimizer = wrap(parameters, _topk(), _adam(parameters), min_numel=0)
    for step in range(25):
        gradients = gradients_of(hvd.rank(), step, parameters)
        gradients["last"][0] *= 1e-3  # as important as the others to Adam
        if step < 4:
            gradients["first"][::2] = 0
        _step(optimizer, parameters, step, gradients)
        must_be_the_same(f"step {step}", parameters)
    assert torch.equal(parameters["first"].detach()[::2], start[::2])
    moved = parameters["last"].detach() - make_parameters(SHAPES)["last"].detach()
    assert float(moved[0].abs().mean()) > 0.2 * float(moved[1:].abs().mean())


def check_unfit_exchanges_are_refused():
    if hvd.size() == 1:
        return
    parameters = make_parameters(SHAPES)
    for adam, compression, message in (
        (_adam(parameters), compressors.TopK(0.1), "needs compression"),
        (_adam(parameters), compressors.TopK(0.1, momentum=0.5), "beta1, 0.9"),
        (compressors.OneBitAdam(list(parameters.values())), _topk(), "makes its own momentum"),
    ):
        with pytest.raises(ValueError, match=message):
            wrap(parameters, compression, adam)
