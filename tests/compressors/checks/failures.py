"""What must not happen silently: non-finite gradients, different settings, parameters that would not be reduced."""

from __future__ import annotations

import itertools
import re

import horovod.torch as hvd
import pytest
import torch

import compressors

from .common import (
    VARIANTS,
    assert_equal,
    backward,
    gradients_of,
    make_parameters,
    wrap,
)


def check_a_step_with_a_non_finite_gradient_did_not_happen():
    """With a poisoned step in between, everything goes on bit for bit as without it."""
    bad_values = itertools.cycle([float("nan"), float("inf"), float("-inf")])
    for (name, make), bad in zip(VARIANTS.items(), bad_values, strict=False):
        ends = []
        for poison in (False, True):
            parameters = make_parameters()
            optimizer = wrap(parameters, make(), torch.optim.AdamW(list(parameters.values()), lr=0.01))
            for step in range(3):
                if poison and step == 2:
                    _poisoned_step(optimizer, parameters, bad, name)
                optimizer.zero_grad()
                backward(parameters, gradients_of(hvd.rank(), step, parameters))
                optimizer.step()
            ends.append({key: p.detach() for key, p in parameters.items()})
            ends.append(optimizer.compression_state_dict()["residuals"])
        assert_equal(ends[2], ends[0])
        assert_equal(ends[3], ends[1])


def _poisoned_step(optimizer, parameters, bad: float, name: str) -> None:
    optimizer.zero_grad()
    mine = gradients_of(hvd.rank(), 99, parameters)
    if hvd.rank() == hvd.size() - 1:
        mine["weight"].view(-1)[5] = bad
    backward(parameters, mine)
    optimizer.synchronize()
    assert not all(p.grad.isfinite().all() for p in parameters.values()), name
    if hvd.size() > 1:
        assert all(p.grad.isnan().all() for p in parameters.values()), name
    with optimizer.skip_synchronize():
        optimizer.step()


def check_a_sum_that_overflows_is_a_skipped_step():
    if hvd.size() == 1:
        return
    parameters = make_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = wrap(parameters, compressors.TopK(0.1), op=hvd.Sum)
    backward(parameters, {name: torch.full_like(p, 3e38) for name, p in parameters.items()})
    optimizer.step()
    assert_equal({name: p.detach() for name, p in parameters.items()}, before)
    assert not any(r.any() for r in optimizer.compression_state_dict()["residuals"].values())


def check_different_settings_fail_everywhere():
    if hvd.size() == 1:
        return
    last = hvd.rank() == hvd.size() - 1
    wrong = {"b": (37, 41), "a": (41,)} if last else {"a": (41,), "b": (37, 41)}
    cases = [
        (make_parameters(), compressors.TopK(0.05 if last else 0.01), {}, "compression.density"),
        (make_parameters(), compressors.get("onebit" if last else "bf16"), {}, "compression.compressor"),
        (make_parameters({"a": (8, 9 if last else 8)}), None, {}, "parameters[0].shape[1]"),
        (make_parameters({"a": (8, 9)} | ({"b": (1,)} if last else {})), None, {}, "number of parameters"),
        (make_parameters(wrong), None, {}, "parameters[0].name"),
        (make_parameters(), None, {"op": hvd.Sum if last else hvd.Average}, "op"),
    ]
    for parameters, compression, options, where in cases:
        with pytest.raises(ValueError, match=re.escape(f"{where} is") + f".*on rank {hvd.size() - 1}"):
            wrap(parameters, compression, **options)
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="still alive")) == hvd.size()


def check_parameters_that_would_not_be_reduced():
    parameters = make_parameters()
    parameters["head"].requires_grad_(False)
    optimizer = wrap(parameters)
    parameters["head"].requires_grad_(True)
    with pytest.raises(ValueError, match="head was unfrozen"):
        optimizer.step()
    parameters = make_parameters()
    optimizer = wrap(parameters)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="number 0 of group 1"):
        optimizer.synchronize()


def check_sparse_gradients_need_a_choice():
    if hvd.size() == 1:
        return
    table = torch.nn.Embedding(50, 30, sparse=True)
    optimizer = wrap(dict(table.named_parameters()))
    with pytest.raises(ValueError, match="sparse_as_dense"):
        table(torch.tensor([1, 2])).sum().backward()
    table = torch.nn.Embedding(50, 30, sparse=True)
    optimizer = wrap(dict(table.named_parameters()), sparse_as_dense=True, op=hvd.Sum)
    table(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.synchronize()
    assert torch.equal(table.weight.grad.sum(1), torch.tensor([30.0] * hvd.size() + [0.0] * (50 - hvd.size())))


def check_two_passes_without_a_step_are_refused():
    if hvd.size() == 1:
        return
    parameters = make_parameters()
    optimizer = wrap(parameters)
    backward(parameters, gradients_of(hvd.rank(), 0, parameters))
    with pytest.raises(AssertionError, match="under way"):
        optimizer.zero_grad()
    optimizer.synchronize()
