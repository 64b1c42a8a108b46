"""Every kind of parameter and gradient, against a dense reference."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch.nn import Parameter

import compressors

from .common import (
    TYPICAL,
    VARIANTS,
    assert_close,
    backward,
    exchange,
    gradients_of,
    make_parameters,
    must_be_the_same,
    summed,
    wrap,
)


def check_gradients_missing_on_some_ranks():
    for make in TYPICAL.values():
        parameters = make_parameters()
        optimizer = wrap(parameters, make(), op=hvd.Sum)
        for step in range(2):
            optimizer.zero_grad()
            mine = gradients_of(hvd.rank(), step, parameters)
            if hvd.rank() == hvd.size() - 1:
                del mine["weight"], mine["bias"]
            backward(parameters, mine)
            optimizer.synchronize()
        must_be_the_same(repr(make()), {n: p.grad for n, p in parameters.items() if p.grad is not None})
    if hvd.size() > 1:
        parameters = make_parameters()
        optimizer = wrap(parameters, op=hvd.Sum)
        mine = gradients_of(hvd.rank(), 0, parameters)
        if hvd.rank() > 0:
            del mine["weight"]
        backward(parameters, mine)
        optimizer.synchronize()
        assert_close({"weight": parameters["weight"].grad}, {"weight": gradients_of(0, 0, parameters)["weight"]}, 0)


def check_unused_and_frozen_parameters():
    for make in TYPICAL.values():
        parameters = make_parameters()
        frozen = parameters["head"].requires_grad_(False)
        optimizer = wrap(parameters, make())
        before = frozen.detach().clone()
        mine = gradients_of(hvd.rank(), 0, parameters)
        del mine["head"], mine["embed"]
        backward(parameters, mine)
        optimizer.step()
        assert frozen.grad is None
        assert torch.equal(frozen.detach(), before)
        assert parameters["embed"].grad is None or not parameters["embed"].grad.any()


def check_tied_weights():
    for names in (["embed"], ["embed", "head"]):  # model.named_parameters() gives one name; users may give both
        parameters = make_parameters({"embed": (64, 32)})
        tied = parameters["embed"]
        optimizer = compressors.DistributedOptimizer(
            torch.optim.SGD([tied], lr=0.1), named_parameters=[(name, tied) for name in names], op=hvd.Sum
        )
        optimizer.zero_grad()
        first = gradients_of(hvd.rank(), 0, parameters)["embed"]
        second = gradients_of(hvd.rank(), 1, parameters)["embed"]
        ((tied * first).sum() + (tied.t() * second.t()).sum()).backward()
        optimizer.synchronize()
        expected = {"embed": summed(0, parameters)["embed"] + summed(1, parameters)["embed"]}
        assert_close({"embed": tied.grad}, expected, 1e-6)


def check_odd_shapes():
    shapes = {"scalar": (), "empty": (0, 5), "one": (1,), "one by one": (1, 1), "tall": (2049, 1), "flat": (9, 129)}
    for make in TYPICAL.values():
        parameters = make_parameters(shapes)
        optimizer = wrap(parameters, make())
        for step in range(2):
            output = exchange(optimizer, parameters, step)
            must_be_the_same(f"{make()} {step}", output)
            for name in ("scalar", "empty", "one", "one by one"):
                expected = summed(step, parameters)[name] / hvd.size()
                torch.testing.assert_close(output[name].double(), expected, rtol=0, atol=2e-2)


def check_everything_small_in_every_codec():
    """Codecs meet tiny tensors, shorter than the number of ranks, where nothing is left out."""
    for shapes in ({"one": (1, 1)}, {"seven": (7, 1), "three": (3, 1), "nine": (9, 1)}):
        for make in VARIANTS.values():
            parameters = make_parameters(shapes)
            optimizer = wrap(parameters, make(), min_numel=0)
            for step in range(2):
                must_be_the_same(f"{make()} {step} {list(shapes)}", exchange(optimizer, parameters, step))


def check_channels_last():
    for make in TYPICAL.values():
        outputs = []
        for layout in (torch.contiguous_format, torch.channels_last):
            generator = torch.Generator().manual_seed(3)
            weight = Parameter(torch.randn(32, 8, 3, 3, generator=generator).to(memory_format=layout))
            optimizer = wrap({"weight": weight}, make())
            mine = torch.randn(32, 8, 3, 3, generator=torch.Generator().manual_seed(hvd.rank()))
            weight.grad = torch.zeros_like(weight)
            backward({"weight": weight}, {"weight": mine})
            optimizer.synchronize()
            assert weight.grad.is_contiguous(memory_format=layout)
            outputs.append(weight.grad.contiguous())
        assert torch.equal(outputs[0], outputs[1]), repr(make())


def check_types():
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-12)):
        parameters = make_parameters(dtype=dtype)
        optimizer = wrap(parameters, compressors.get("none"))
        output = exchange(optimizer, parameters, 0)
        reference = {name: total / hvd.size() for name, total in summed(0, parameters).items()}
        assert_close(output, reference, tolerance)
        assert all(gradient.dtype == dtype for gradient in output.values())
        for make in TYPICAL.values() if dtype == torch.bfloat16 else ():
            parameters = make_parameters(dtype=dtype)
            output = exchange(wrap(parameters, make()), parameters, 0)
            assert all(gradient.dtype == dtype for gradient in output.values())
            assert_close({"bias": output["bias"]}, {"bias": reference["bias"]}, max(tolerance, 1e-2))


def check_mixed_types_in_one_model():
    for make in TYPICAL.values():
        parameters = {**make_parameters({"a": (40, 40)}), **make_parameters({"b": (40, 40)}, torch.bfloat16)}
        parameters |= make_parameters({"c": (5,), "d": (60, 30)}, torch.float64)
        output = exchange(wrap(parameters, make()), parameters, 0)
        assert_close({"c": output["c"]}, {"c": summed(0, parameters)["c"] / hvd.size()}, 8e-3)


def check_policies_choose_by_name():
    parameters = make_parameters({"embed": (64, 32), "weight": (64, 32), "norm": (64, 32)})
    rules = [{"match": "emb*", "name": "onebit"}, {"match": "*norm*", "name": "none"}]
    optimizer = wrap(parameters, compressors.get("topk", density=0.01, policies=rules))
    output = exchange(optimizer, parameters, 0)
    if hvd.size() == 1:
        return
    assert len(output["embed"].abs().unique()) <= 2 * hvd.size(), "one-bit: one magnitude for each owner"
    assert int((output["weight"] != 0).sum()) <= 21 * hvd.size(), "top-k"
    reference = {"norm": summed(0, parameters)["norm"] / hvd.size()}
    assert_close({"norm": output["norm"]}, reference, 1e-6)


def check_low_rank_is_exact_where_the_rank_suffices():
    parameters = make_parameters({"weight": (64, 48)})
    optimizer = wrap(parameters, compressors.PowerSGD(8), op=hvd.Sum)
    factors = [torch.randn(64, 2, generator=torch.Generator().manual_seed(rank)).double() for rank in range(hvd.size())]
    right = torch.randn(2, 48, generator=torch.Generator().manual_seed(9)).double()
    for _ in range(2):
        optimizer.zero_grad()
        backward(parameters, {"weight": (factors[hvd.rank()] @ right).float()})
        optimizer.synchronize()
        assert_close({"weight": parameters["weight"].grad}, {"weight": sum(factors) @ right}, 1e-5)


def check_zero_gradients_stay_zero():
    for make in TYPICAL.values():
        parameters = make_parameters()
        optimizer = wrap(parameters, make())
        for step in range(2):
            optimizer.zero_grad()
            backward(parameters, {name: torch.zeros_like(p) for name, p in parameters.items()})
            optimizer.synchronize()
            assert not any(p.grad.any() for p in parameters.values()), f"{make()}, step {step}"
        assert float(exchange(optimizer, parameters, 1)["weight"].norm()) > 0, f"{make()} does not recover"


def check_only_touched_rows_travel():
    for sparse in (False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            table = torch.nn.Embedding(1000, 16, sparse=sparse, dtype=dtype)
            rows = compressors.get("onebit", policies=[{"match": "weight", "name": "rows"}])
            optimizer = wrap(dict(table.named_parameters()), rows, op=hvd.Sum)
            touched = torch.tensor([5, 7 + hvd.rank(), 5]) if hvd.rank() != 1 else torch.empty(0, dtype=torch.long)
            (table(touched).sum() * (hvd.rank() + 1)).backward()
            optimizer.synchronize()
            expected = torch.zeros(1000, 16, dtype=dtype)
            for rank in range(hvd.size()):
                if rank != 1:
                    expected[5] += 2 * (rank + 1)
                    expected[7 + rank] += rank + 1
            if table.weight.grad is not None:
                grad = table.weight.grad.to_dense() if table.weight.grad.is_sparse else table.weight.grad
                assert torch.equal(grad, expected)
            assert optimizer.ledger.bytes_sent <= (hvd.size() - 1) * (4 + 2 * (4 + 16 * dtype.itemsize))
