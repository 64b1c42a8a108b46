"""What carries gradients before compression begins: as where it is the compressor itself, and then no longer."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest

import compressors

from .common import (
    assert_close,
    assert_equal,
    backward,
    exchange,
    gradients_of,
    make_parameters,
    must_be_the_same,
    states_of_all_ranks,
    summed,
    two_levels,
    wrap,
)

MATRICES = {"first": (40, 30), "last": (30, 40)}
SHAPES = {**MATRICES, "bias": (30,)}
WARM_UPS = {"fp16": compressors.FP16, "bf16": compressors.BF16, "int8": compressors.QSGD}
DENSE = 3


def _adam(parameters, kind=compressors.OneBitAdam):
    return kind(list(parameters.values()), lr=0.01, betas=(0.9, 0.95), freeze_step=DENSE)


def _wrapped(compression, warm_up, kind=None, shapes=SHAPES):
    """Parameters, and plain SGD over them, or `kind`, wrapped."""
    parameters = make_parameters(shapes)
    adam = _adam(parameters, kind) if kind else None
    return parameters, wrap(parameters, compression, adam, warm_up=warm_up, min_numel=0)


def _sums_and_bytes(optimizer, parameters, steps):
    """What `exchange` gives for each step, and the bytes that it took."""
    found = []
    for step in steps:
        gradients = exchange(optimizer, parameters, step)
        found.append((gradients, optimizer.ledger.last.bytes_sent))
        with optimizer.skip_synchronize():
            optimizer.step()
    return found


def check_it_is_the_compressor_of_the_dense_stage():
    """Bit for bit the sums that the same codec gives as the compressor; then those of the compressed stage."""
    cases = [
        (compressors.OneBit(), compressors.OneBitAdam),
        (compressors.TopK(0.1, momentum=0.9), compressors.TopKAdam),
        (compressors.PowerSGD(2, dense_steps=DENSE), None),
        (compressors.TopK(0.1, dense_steps=DENSE), None),
    ]
    for compression, kind in cases:
        for name, warm_up in WARM_UPS.items():
            label = f"{type(compression).__name__} after {name}"
            own, ours = _wrapped(compression, warm_up(), kind, MATRICES)
            other, reference = _wrapped(warm_up(), None, None, MATRICES)
            found = _sums_and_bytes(ours, own, range(DENSE + 3))
            expected = _sums_and_bytes(reference, other, range(DENSE))
            for (gradients, _), (wanted, _) in zip(found, expected, strict=False):
                assert_equal(gradients, wanted)
            must_be_the_same(label, own)
            if hvd.size() > 1:
                counts = [count for _, count in found]
                assert len(set(counts[:DENSE])) == 1, (label, counts)
                assert counts[DENSE] < counts[0], (label, counts)


def check_few_bytes_before_compression():
    """int8 sends a quarter of float32 in the dense stage, and nothing else of the run changes its size."""
    if hvd.size() == 1:
        return
    counts = {}
    for name in (None, "int8"):
        parameters, optimizer = _wrapped(compressors.OneBit(), name and compressors.get(name), compressors.OneBitAdam)
        counts[name] = [count for _, count in _sums_and_bytes(optimizer, parameters, range(DENSE + 2))]
    assert counts[None][DENSE:] == counts["int8"][DENSE:]
    assert 3.5 * counts["int8"][0] < counts[None][0], counts


def check_resuming_is_going_on():
    """From the middle of the dense stage, and from the compressed one."""
    for saved_at in (1, DENSE + 2):
        parameters, optimizer = _wrapped(compressors.OneBit(), compressors.QSGD(), compressors.OneBitAdam)
        for step in range(DENSE + 4):
            if step == saved_at:
                saved = copy.deepcopy((optimizer.state_dict(), states_of_all_ranks(optimizer)))
                values = {name: p.detach().clone() for name, p in parameters.items()}
            _sums_and_bytes(optimizer, parameters, [step])
        resumed, again = _wrapped(compressors.OneBit(), compressors.QSGD(), compressors.OneBitAdam)
        for name, value in values.items():
            resumed[name].data.copy_(value)
        again.load_state_dict(saved[0])
        again.load_compression_state_dict(saved[1])
        _sums_and_bytes(again, resumed, range(saved_at, DENSE + 4))
        assert_equal({n: p.detach() for n, p in resumed.items()}, {n: p.detach() for n, p in parameters.items()})


def check_a_poisoned_step_did_not_happen():
    for name, warm_up in WARM_UPS.items():
        ends = []
        for poison in (False, True):
            parameters, optimizer = _wrapped(compressors.OneBit(), warm_up(), compressors.OneBitAdam)
            for step in range(DENSE + 2):
                if poison and step == 1:
                    gradients = gradients_of(hvd.rank(), 50, parameters)
                    if hvd.rank() == hvd.size() - 1:
                        gradients["last"][3, 3] = float("inf")
                    optimizer.zero_grad()
                    backward(parameters, gradients)
                    optimizer.step()
                    assert all(p.grad.isnan().all() for p in parameters.values()) or hvd.size() == 1, name
                _sums_and_bytes(optimizer, parameters, [step])
            ends.append({key: p.detach() for key, p in parameters.items()})
        assert_equal(ends[1], ends[0])


def check_between_nodes():
    """In a hierarchy the outer compressor is the one that waits."""
    compression = two_levels("onebit")
    parameters, optimizer = _wrapped(compression, compressors.FP16(), compressors.OneBitAdam)
    for step, (gradients, _) in enumerate(_sums_and_bytes(optimizer, parameters, range(DENSE + 2))):
        if step < DENSE:
            expected = {name: total / hvd.size() for name, total in summed(step, parameters).items()}
            assert_close(gradients, expected, 2e-3)
    must_be_the_same("end", parameters)


def check_what_cannot_warm_up_is_refused():
    for warm_up in (compressors.OneBit(), compressors.NoCompression(), compressors.ErrorFeedback(compressors.QSGD())):
        with pytest.raises(ValueError, match="choose fp16, bf16 or int8"):
            _wrapped(compressors.OneBit(), warm_up, compressors.OneBitAdam)
    for compression in (compressors.OneBit(), compressors.TopK(momentum=0.9, dense_steps=5), compressors.FP16()):
        with pytest.raises(ValueError, match="nothing to carry"):
            _wrapped(compression, compressors.FP16())
    for compression in (compressors.NoCompression(), compressors.FP16()):  # float32 in the dense stage, whatever it is
        with pytest.raises(ValueError, match="nothing to carry"):
            _wrapped(compression, compressors.QSGD(), compressors.OneBitAdam)
