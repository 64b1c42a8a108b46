"""Every way of using the optimizer, against a dense reference."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch.nn import Parameter

import compressors
from compressors.codec import Codec

from .common import (
    VARIANTS,
    assert_close,
    assert_equal,
    backward,
    exchange,
    gradients_of,
    make_parameters,
    must_be_the_same,
    summed,
    wrap,
)


def check_uneven_micro_batches():
    """Ranks accumulate 1, 2, 3, 0 passes; the last one sends."""
    parameters = make_parameters()
    optimizer = wrap(parameters, op=hvd.Sum)
    passes = {rank: [10 * rank + index for index in range((rank + 1) % 4)] for rank in range(hvd.size())}
    mine = passes[hvd.rank()]
    for step in mine[:-1]:
        with optimizer.no_sync():
            backward(parameters, gradients_of(hvd.rank(), step, parameters))
    if mine:
        backward(parameters, gradients_of(hvd.rank(), mine[-1], parameters))
    optimizer.synchronize()
    expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    for rank, steps in passes.items():
        for step in steps:
            for name, gradient in gradients_of(rank, step, parameters).items():
                expected[name] += gradient
    assert_close({name: p.grad for name, p in parameters.items()}, expected, 1e-6)


def check_no_sync_alone_sends_at_synchronize():
    parameters = make_parameters()
    optimizer = wrap(parameters)
    with optimizer.no_sync():
        backward(parameters, gradients_of(hvd.rank(), 0, parameters))
    optimizer.synchronize()
    expected = {name: total / hvd.size() for name, total in summed(0, parameters).items()}
    assert_close({name: p.grad for name, p in parameters.items()}, expected, 1e-6)


def check_no_sync_after_sending_is_refused():
    if hvd.size() == 1:
        return
    parameters = make_parameters()
    optimizer = wrap(parameters)
    backward(parameters, gradients_of(hvd.rank(), 0, parameters))
    with pytest.raises(RuntimeError, match="no_sync"), optimizer.no_sync():
        pass
    optimizer.synchronize()


def check_backward_passes_per_step():
    parameters = make_parameters()
    optimizer = wrap(parameters, backward_passes_per_step=3)
    for _ in range(2):
        optimizer.zero_grad()
        for step in range(3):
            backward(parameters, gradients_of(hvd.rank(), step, parameters))
        optimizer.synchronize()
        totals = [summed(step, parameters) for step in range(3)]
        expected = {name: sum(total[name] for total in totals) / hvd.size() for name in parameters}
        assert_close({name: p.grad for name, p in parameters.items()}, expected, 1e-6)


def check_clipping_between_synchronize_and_step():
    for make in VARIANTS.values():
        parameters = make_parameters()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        optimizer = wrap(parameters, make())
        output = exchange(optimizer, parameters, 0)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        norm = torch.stack([gradient.norm() for gradient in output.values()]).norm()
        expected = {name: before[name] - 0.1 * output[name] * min(1.0, 0.5 / float(norm)) for name in parameters}
        assert_close({name: p.detach() for name, p in parameters.items()}, expected, 1e-5)


def check_adam_against_dense_reference():
    ours, plain = make_parameters(), make_parameters()
    optimizer = wrap(ours, None, torch.optim.AdamW(list(ours.values()), lr=0.01))
    reference = torch.optim.AdamW(list(plain.values()), lr=0.01)
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        backward(ours, gradients_of(hvd.rank(), step, ours))
        optimizer.step()
        for name, total in summed(step, plain).items():
            plain[name].grad = (total / hvd.size()).float()
        reference.step()
    assert_close({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in plain.items()}, 1e-5)


def check_gradients_missing_on_some_ranks():
    for make in VARIANTS.values():
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
    for make in VARIANTS.values():
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
    for make in VARIANTS.values():
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
    for shapes in ({"one": (1, 1)}, {"three": (3, 1), "seven": (7, 1)}, {"eight": (8, 1), "nine": (9, 1)}):
        for make in VARIANTS.values():
            parameters = make_parameters(shapes)
            optimizer = wrap(parameters, make(), min_numel=0)
            for step in range(2):
                must_be_the_same(f"{make()} {step} {list(shapes)}", exchange(optimizer, parameters, step))


def check_channels_last():
    for make in VARIANTS.values():
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
        for make in VARIANTS.values():
            parameters = make_parameters(dtype=dtype)
            output = exchange(wrap(parameters, make()), parameters, 0)
            assert all(gradient.dtype == dtype for gradient in output.values())
            assert_close({"bias": output["bias"]}, {"bias": reference["bias"]}, max(tolerance, 1e-2))


def check_mixed_types_in_one_model():
    for make in VARIANTS.values():
        parameters = {**make_parameters({"a": (40, 40)}), **make_parameters({"b": (40, 40)}, torch.bfloat16)}
        parameters |= make_parameters({"c": (5,), "d": (60, 30)}, torch.float64)
        output = exchange(wrap(parameters, make()), parameters, 0)
        assert_close({"c": output["c"]}, {"c": summed(0, parameters)["c"] / hvd.size()}, 8e-3)


def check_loss_scale_is_taken_out():
    for name, make in VARIANTS.items():
        if name in ("none", "fp16"):
            continue  # linear and without memory: they leave the scale in
        results = []
        for scale in (1.0, 2.0**12):
            parameters = make_parameters()
            optimizer = wrap(parameters, make(), scaler=lambda scale=scale: scale)
            for step in range(3):
                output = exchange(optimizer, parameters, step, factor=scale)
                results.append({name: gradient / scale for name, gradient in output.items()})
            results.append(optimizer.compression_state_dict()["residuals"])
        for plain, scaled in zip(results[:4], results[4:], strict=True):
            assert_equal(scaled, plain)


def check_grad_scaler():
    parameters = make_parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = wrap(parameters, compressors.TopK(0.1), scaler=scaler)
    for poisoned in (False, True, False):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        scale = scaler.get_scale()
        optimizer.zero_grad()
        mine = gradients_of(hvd.rank(), 0, parameters)
        if poisoned and hvd.rank() == hvd.size() - 1:
            mine["weight"][0, 0] = float("inf")
        loss = sum((parameters[name] * gradient).sum() for name, gradient in mine.items())
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        after = {name: p.detach() for name, p in parameters.items()}
        must_be_the_same(f"scale {scale}", after)
        assert scaler.get_scale() == (scale / 2 if poisoned else scale)
        if poisoned:
            assert_equal(after, before)
        else:
            assert not torch.equal(after["weight"], before["weight"])


def check_process_sets():
    if hvd.size() < 3:
        return
    pair = hvd.add_process_set([0, hvd.size() - 1])
    try:
        for make in VARIANTS.values():
            parameters = make_parameters()
            optimizer = wrap(parameters, make(), process_set=pair)
            output = exchange(optimizer, parameters, 0)
            if not pair.included():
                assert_equal(output, gradients_of(hvd.rank(), 0, parameters))
            everywhere = hvd.allgather_object({name: gradient.numpy().tobytes() for name, gradient in output.items()})
            assert everywhere[0] == everywhere[-1]
            assert everywhere[0] != everywhere[1]
        parameters = make_parameters()
        optimizer = wrap(parameters, compressors.get("none"), process_set=pair, op=hvd.Sum)
        output = exchange(optimizer, parameters, 0)
        if pair.included():
            assert_close(output, summed(0, parameters, pair.ranks), 1e-6)
    finally:
        hvd.remove_process_set(pair)


def check_several_optimizers_at_once():
    first, second = make_parameters(), make_parameters()
    optimizers = [wrap(first, compressors.OneBit()), wrap(second, compressors.TopK(0.1))]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(first, gradients_of(hvd.rank(), step, first))
        backward(second, gradients_of(hvd.rank(), step, second))
        for optimizer in reversed(optimizers):
            optimizer.step()
    must_be_the_same("first", {n: p.detach() for n, p in first.items()})
    must_be_the_same("second", {n: p.detach() for n, p in second.items()})


def check_many_buckets_sent_in_another_order_on_each_rank():
    shapes = {f"layer {index}": (40, 30) for index in range(9)}
    for make in VARIANTS.values():
        parameters = make_parameters(shapes)
        optimizer = wrap(parameters, make(), bucket_bytes=2 * 4 * 1200)
        names = sorted(parameters, key=lambda name: hash((name[-1:], hvd.rank())))
        mine = gradients_of(hvd.rank(), 0, parameters)
        for name in names:
            (parameters[name] * mine[name]).sum().backward()
        optimizer.synchronize()
        must_be_the_same(repr(make()), {name: p.grad for name, p in parameters.items()})


def check_buckets_leave_while_backward_goes_on():
    if hvd.size() == 1:
        return
    sent = []

    class Watched(compressors.OneBit):
        def encode(self, values, frame):
            sent.append(frame.stream)
            return super().encode(values, frame)

    parameters = make_parameters({"first": (40, 30), "last": (40, 30)})
    optimizer = wrap(parameters, Watched(), bucket_bytes=4 * 1200)
    (parameters["last"].sum()).backward()
    assert set(sent) == {0}, "the bucket of the last parameter is ready"
    (parameters["first"].sum()).backward()
    optimizer.synchronize()


def check_a_plugin_is_one_class():
    class Halves(Codec):
        """Rounds to float16 and lets every rank decode every payload."""

        error_feedback = True

        def pattern(self, frame):
            return compressors.Pattern.ALL_GATHER

        def encode(self, values, frame):
            return values.half().view(torch.uint8)

        def decode(self, payload, frame):
            return payload.clone().view(torch.float16).float()

        def nbytes(self, frame):
            return 2 * frame.numel

    parameters = make_parameters()
    output = exchange(wrap(parameters, Halves(), op=hvd.Sum), parameters, 0)
    assert_close(output, summed(0, parameters), 1e-3)


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


def check_the_users_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for make in VARIANTS.values():
        parameters = make_parameters()
        exchange(wrap(parameters, make()), parameters, 0)
    assert torch.equal(torch.rand(3), expected)


def check_zero_gradients_stay_zero():
    for make in VARIANTS.values():
        parameters = make_parameters()
        optimizer = wrap(parameters, make())
        for step in range(2):
            optimizer.zero_grad()
            backward(parameters, {name: torch.zeros_like(p) for name, p in parameters.items()})
            optimizer.synchronize()
            assert not any(p.grad.any() for p in parameters.values()), f"{make()}, step {step}"
        assert float(exchange(optimizer, parameters, 1)["weight"].norm()) > 0, f"{make()} does not recover"
