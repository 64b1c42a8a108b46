"""Every compressor: the same bits everywhere, nothing lost, close to the dense reference."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import compressors

from .common import (
    VARIANTS,
    assert_close,
    assert_equal,
    backward,
    exchange,
    gradients_of,
    make_parameters,
    must_be_the_same,
    owed_in_total,
    states_of_all_ranks,
    summed,
    wrap,
)


def check_same_bits_on_all_ranks():
    for name, make in VARIANTS.items():
        parameters = make_parameters()
        optimizer = wrap(parameters, make())
        for step in range(3):
            must_be_the_same(f"{name}, step {step}", exchange(optimizer, parameters, step))
            with optimizer.skip_synchronize():
                optimizer.step()
        must_be_the_same(name, parameters)


def check_nothing_is_lost():
    for name, make in VARIANTS.items():
        parameters = make_parameters()
        if not all(make().for_parameter(key).error_feedback for key in parameters):
            continue
        optimizer = wrap(parameters, make(), op=hvd.Sum)
        arrived = {key: torch.zeros(p.shape, dtype=torch.float64) for key, p in parameters.items()}
        sent = {key: torch.zeros(p.shape, dtype=torch.float64) for key, p in parameters.items()}
        for step in range(3):
            output = exchange(optimizer, parameters, step)
            for key, total in summed(step, parameters).items():
                arrived[key] += output[key]
                sent[key] += total
        owed = owed_in_total(states_of_all_ranks(optimizer), parameters)
        if hvd.size() > 1:
            assert any(float(tensor.abs().sum()) > 0 for tensor in owed.values()), f"{name} compressed nothing"
        assert_close({key: arrived[key] + owed[key] for key in arrived}, sent, 2e-6)


def check_codes_without_feedback_are_close():
    tolerances = {"none": 1e-6, "fp16": 2e-3, "bf16": 8e-3, "int8": 3e-2}
    for name, tolerance in tolerances.items():
        for op in (hvd.Average, hvd.Sum):
            parameters = make_parameters()
            output = exchange(wrap(parameters, compressors.get(name), op=op), parameters, 0)
            divisor = hvd.size() if op == hvd.Average else 1
            reference = {key: total / divisor for key, total in summed(0, parameters).items()}
            assert_close(output, reference, tolerance)


def check_average_is_sum_divided():
    for make in VARIANTS.values():
        outputs = []
        for op in (hvd.Sum, hvd.Average):
            parameters = make_parameters()
            outputs.append(exchange(wrap(parameters, make(), op=op), parameters, 0))
        assert_close({key: value * hvd.size() for key, value in outputs[1].items()}, outputs[0], 1e-6)


def check_no_compression_equals_horovod_bitwise():
    for op in (hvd.Average, hvd.Sum):
        ours, stock = make_parameters(), make_parameters()
        first = wrap(ours, compressors.get("none"), op=op)
        second = hvd.DistributedOptimizer(
            torch.optim.SGD(list(stock.values()), lr=0.1),
            named_parameters=[(f"stock.{op}.{name}", p) for name, p in stock.items()],
            op=op,
        )
        for step in range(3):
            exchange(first, ours, step)
            exchange(second, stock, step)
            for optimizer in (first, second):
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert_equal({n: p.grad for n, p in ours.items()}, {n: p.grad for n, p in stock.items()})
            assert_equal({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in stock.items()})


def check_fp16_sum_cannot_overflow_where_the_mean_does_not():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.get("fp16"))
    backward(parameters, {name: torch.full_like(p, 6e4) for name, p in parameters.items()})
    optimizer.synchronize()
    for name, parameter in parameters.items():
        assert float((parameter.grad - 6e4).abs().max()) <= 32, name


def check_one_rank_is_plain_torch_bitwise():
    if hvd.size() > 1:
        return
    for make in VARIANTS.values():
        ours, plain = make_parameters(), make_parameters()
        optimizer = wrap(ours, make(), torch.optim.AdamW(list(ours.values()), lr=0.1))
        reference = torch.optim.AdamW(list(plain.values()), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            reference.zero_grad()
            backward(ours, gradients_of(0, step, ours))
            backward(plain, gradients_of(0, step, plain))
            optimizer.step()
            reference.step()
        assert_equal({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in plain.items()})
        assert optimizer.ledger.total.bytes_sent == 0


def check_a_dense_start_is_exact():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.PowerSGD(2, dense_steps=2))
    for step in range(3):
        found = exchange(optimizer, parameters, step)
        expected = {name: total / hvd.size() for name, total in summed(step, parameters).items()}
        if step < 2:
            assert_close(found, expected, 1e-6)
            assert optimizer.ledger.bytes_sent >= optimizer.ledger.bytes_dense
        elif hvd.size() > 1:
            assert (found["weight"].double() - expected["weight"]).norm() > 0.1 * expected["weight"].norm()
            assert optimizer.ledger.bytes_sent < optimizer.ledger.bytes_dense / 2
