"""Every way of using the optimizer, against a dense reference."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
import torch

import compressors
from compressors.codec import Codec
from compressors.exchange import process_set

from .common import (
    TYPICAL,
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
    for make in TYPICAL.values():
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


def check_loss_scale_is_taken_out():
    for name, make in TYPICAL.items():
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
    pair = process_set([0, hvd.size() - 1])
    for name, make in TYPICAL.items():
        if name.startswith("hierarchical"):
            continue  # its nodes are of all ranks
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
    for make in TYPICAL.values():
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
        def encode_slices(self, values, frame, rooms):
            sent.append(frame.stream)
            return super().encode_slices(values, frame, rooms)

    parameters = make_parameters({"first": (40, 30), "last": (40, 30)})
    optimizer = wrap(parameters, Watched(), bucket_bytes=4 * 1200)
    (parameters["last"].sum()).backward()
    assert set(sent) == {0}, "the bucket of the last parameter is ready"
    (parameters["first"].sum()).backward()
    optimizer.synchronize()


def check_rolling_back_while_gradients_are_under_way():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.get("bf16"), op=hvd.Sum, bucket_bytes=4 * 300, min_numel=1)
    saved = optimizer.state_dict()
    for step in range(3):
        backward(parameters, gradients_of(hvd.rank(), step, parameters))
        time.sleep(0.02 * hvd.rank())
        if hvd.size() > 1:
            with pytest.raises(RuntimeError, match="under way"):
                optimizer.load_compression_state_dict(optimizer.compression_state_dict())
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
    assert_close(exchange(optimizer, parameters, 3), summed(3, parameters), 1e-2)


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


def check_payloads_may_be_the_values_themselves():
    class Same(Codec):
        """float32 as it is."""

        def __init__(self, how: str, *, error_feedback: bool) -> None:
            self.how, self.error_feedback = how, error_feedback

        def pattern(self, frame):
            return compressors.Pattern(self.how)

        def encode(self, values, frame):
            return values if self.how == "all_reduce" else values.view(torch.uint8)

        def decode(self, payload, frame):
            return payload.clone().view(torch.float32)

        def nbytes(self, frame):
            return 4 * frame.numel

    for pattern in ("all_reduce", "all_gather", "two_phase"):
        for error_feedback in (False, True):
            parameters = make_parameters()
            compressor = Same(pattern, error_feedback=error_feedback)
            optimizer = wrap(parameters, compressor, op=hvd.Sum, min_numel=0, bucket_bytes=4000)
            assert_close(exchange(optimizer, parameters, 0), summed(0, parameters), 1e-6)


def check_the_users_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for make in TYPICAL.values():
        parameters = make_parameters()
        exchange(wrap(parameters, make()), parameters, 0)
    assert torch.equal(torch.rand(3), expected)
