"""What wrapping gives and refuses, on any number of ranks."""

from __future__ import annotations

import horovod
import horovod.torch as hvd
import pytest
import torch

import compressors

from .common import backward, exchange, gradients_of, make_parameters, wrap


def _optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def check_what_cannot_be_served_is_refused():
    for options, message in (
        ({"groups": 2}, "groups"),
        ({"num_groups": 2}, "groups"),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"compression": hvd.Compression.fp16}, "not a compressor"),
        ({"compression": "topk"}, "compressors.get"),
    ):
        with pytest.raises(ValueError, match=message):
            compressors.DistributedOptimizer(_optimizer(), **options)


def check_an_unknown_horovod_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod, "__version__", "0.29.0")
        with pytest.raises(RuntimeError, match=r"supports Horovod 0\.28\.1, found 0\.29\.0"):
            compressors.DistributedOptimizer(_optimizer())


def check_the_hook_is_what_this_horovod_has():
    """Pins the private names and the callable handle of the Horovod release in use."""
    stock = hvd.DistributedOptimizer(_optimizer())
    assert {"_handles", "_allreduce_delay", "_requires_update", "_parameter_names"} <= set(vars(stock))
    parameter = stock.param_groups[0]["params"][0]
    parameter.grad = torch.ones(3)
    stock._requires_update.add(parameter)
    type(stock)._allreduce_grad_async = lambda self, p: (lambda: torch.full((3,), 7.0), None)
    stock.synchronize()
    assert torch.equal(parameter.grad, torch.full((3,), 7.0))


def check_wrapping_gives_horovods_object():
    optimizer = compressors.DistributedOptimizer(_optimizer())
    assert type(optimizer).__module__ == type(hvd.DistributedOptimizer(_optimizer())).__module__
    assert isinstance(optimizer, torch.optim.SGD)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def check_reducing_twice_is_warned_of():
    optimizer = compressors.DistributedOptimizer(_optimizer())
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_the_compressor_can_be_changed():
    parameters = make_parameters()
    optimizer = wrap(parameters)
    exact = exchange(optimizer, parameters, 0)
    for name in ("fp16", "int8", "none"):
        optimizer.set_compression(compressors.get(name))
        changed = exchange(optimizer, parameters, 0)
        assert max(float((changed[key] - exact[key]).abs().max()) for key in exact) < (0.1 if name != "none" else 1e-6)
    assert optimizer.compression_state_dict()["steps"] == 4
    with pytest.raises(ValueError, match="not a compressor"):
        optimizer.set_compression("int8")
    if hvd.size() > 1:
        optimizer.zero_grad()
        backward(parameters, gradients_of(hvd.rank(), 1, parameters))
        with pytest.raises(RuntimeError, match="under way"):
            optimizer.set_compression(compressors.get("int8"))
        optimizer.synchronize()
    adam = compressors.OneBitAdam(list(make_parameters().values()), lr=1e-3, freeze_step=1)
    wrapped = compressors.DistributedOptimizer(adam, compression=compressors.OneBit())
    with pytest.raises(ValueError, match="OneBitAdam keeps the compressor"):
        wrapped.set_compression(compressors.get("none"))
