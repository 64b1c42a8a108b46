"""What a launched rank checks: rehearsed bytes are those of real exchanges; all ranks measure the same figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import Parameter

import compressors
from compressors.rehearsal import Kind, rehearse
from hvd_novel import comm
from hvd_novel.tuning.measure import measure_coding, measure_link
from hvd_novel.tuning.model import Work, predict
from hvd_novel.tuning.schemes import SAFE, SCHEMES

SHAPES = [(300, 41), (64,), (0, 5), (1000, 7), (3,), (40, 40)]


def exchange(optimizer, parameters: list[Parameter], value: float | None) -> None:
    """Of gradients that are `value` everywhere, or random."""
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) if value is None else torch.full_like(parameter, value)
    optimizer.synchronize()


def main() -> None:
    """Run all checks on this rank."""
    topology = comm.init(deterministic=False)
    torch.set_num_threads(1)
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    optimizer = comm.distributed(
        compressors.DistributedOptimizer, torch.optim.SGD(parameters, lr=0.0), named_parameters=named
    )
    for name in [*SCHEMES, *reversed(SCHEMES)]:  # one after another, on the same optimizer
        compressor = compressors.get(**SCHEMES[name])
        optimizer.set_compression(compressor)
        exchange(optimizer, parameters, 1.0 + topology.rank if name in SAFE else None)
        total = sum(range(1, topology.size + 1))
        if name in SAFE:
            assert all(torch.allclose(p.grad, torch.full_like(p, total), rtol=0.02) for p in parameters), name
            state = optimizer.compression_state_dict()
            assert not any(state[kept] for kept in ("residuals", "momenta", "owed", "memory")), "changing loses nothing"
        sent = comm.all_gather_object(optimizer.ledger.bytes_sent, "worker.bytes")
        rehearsed = rehearse(named, compressor, topology.size, rounds=0)
        # On three ranks and more, what top-k sends to whom depends on the values.
        spread = 0.2 * sent[0] if name.startswith("topk") and topology.size > 2 else 0
        assert abs(rehearsed.bytes_sent - sent[0]) <= spread, (name, rehearsed.bytes_sent, sent)
        assert rehearsed.bytes_dense == optimizer.ledger.bytes_dense
    assert optimizer.compression_state_dict()["steps"] == 2 * len(SCHEMES), "steps go on counting"

    with pytest.raises(ValueError, match="different settings"):
        optimizer.set_compression(compressors.get("topk", density=0.1 + 0.1 * topology.rank))
    exchange(optimizer, parameters, None)  # by the compressor before

    link = measure_link(torch.device("cpu"), lambda: torch.ones(300, 300) @ torch.ones(300, 300))
    assert link.ranks == topology.size
    assert min(link.round_seconds, *link.rates.values()) > 0
    assert set(link.rates) == set(Kind)
    assert 0 <= link.overlap <= 1
    coding = measure_coding(named, {"int8": SCHEMES["int8"]}, topology.size)
    seconds = predict(Work(1.0, 0.5), link, coding["int8"]).seconds
    figures = comm.all_gather_object((dataclasses.asdict(link), seconds), "worker.figures")
    assert all(other == figures[0] for other in figures)
    print("all is as rehearsed", flush=True)
    comm.leave(0)


main()
