"""Nodes of two ranks on one machine: what crosses between them, and that nothing changes besides."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import compressors
from compressors.exchange import process_set

from .common import (
    assert_close,
    assert_equal,
    exchange,
    gradients_of,
    make_parameters,
    must_be_the_same,
    owed_in_total,
    states_of_all_ranks,
    summed,
    two_levels,
    wrap,
)

ODD = [[0, 3], [2, 1]]
"""Nodes whose ranks do not follow each other."""


def check_without_compression_it_is_the_dense_sum():
    for inner, tolerance in (("none", 1e-6), ("fp16", 2e-3), ("bf16", 8e-3)):
        for op in (hvd.Sum, hvd.Average):
            parameters = make_parameters()
            output = exchange(wrap(parameters, two_levels("none", inner), op=op), parameters, 0)
            divisor = hvd.size() if op == hvd.Average else 1
            assert_close(output, {name: total / divisor for name, total in summed(0, parameters).items()}, tolerance)


def check_it_is_the_flat_exchange_of_the_nodes_sums():
    """Against the outer compressor alone, on two ranks, of which each has a node's sum, and a rank's share of it."""
    if hvd.size() < 4:
        return
    pair = process_set([0, 1])
    for outer in (
        compressors.OneBit(),
        compressors.TopK(0.05, exchange="two_phase", selection="exact"),
        compressors.TopK(0.05, exchange="all_gather", momentum=0.9),
        compressors.ErrorFeedback(compressors.QSGD()),
    ):
        found, expected = _hierarchy(outer), _flat(outer, pair)
        for step, output in enumerate(found):
            must_be_the_same(f"{outer}, step {step}", {"weight": output})
            if pair.included():
                torch.testing.assert_close(output, expected[step], rtol=1e-5, atol=1e-5)


# One matrix in two halves, which are the shares: each half is a bucket of its own in the flat exchange.
_HALVES = {"first": (32, 40), "second": (32, 40)}


def _hierarchy(outer) -> list[torch.Tensor]:
    parameters = make_parameters(_HALVES)
    optimizer = wrap(parameters, compressors.Hierarchical(outer=outer, nodes=[[0, 1], [2, 3]]), op=hvd.Sum)
    outputs = [exchange(optimizer, parameters, step) for step in range(4)]
    return [torch.cat([output["first"], output["second"]]) for output in outputs]


def _flat(outer, pair) -> list[torch.Tensor]:
    parameters = make_parameters(_HALVES)
    optimizer = wrap(parameters, outer, op=hvd.Sum, process_set=pair, bucket_bytes=4 * 32 * 40)
    outputs = []
    for step in range(4):
        optimizer.zero_grad()
        node = (2 * hvd.rank(), 2 * hvd.rank() + 1) if pair.included() else (0,)
        every = [gradients_of(rank, step, parameters) for rank in node]
        sum((parameters[name] * sum(mine[name] for mine in every)).sum() for name in parameters).backward()
        optimizer.synchronize()
        outputs.append(torch.cat([parameters["first"].grad, parameters["second"].grad]).clone())
    return outputs


def check_any_nodes_do():
    if hvd.size() < 4:
        return
    for nodes in (ODD, [[3, 2, 1, 0]], [[2], [0], [3], [1]]):
        parameters = make_parameters()
        compression = compressors.Hierarchical(outer=compressors.TopK(0.1), nodes=nodes)
        optimizer = wrap(parameters, compression, op=hvd.Sum)
        outputs = [exchange(optimizer, parameters, step) for step in range(3)]
        must_be_the_same(repr(nodes), outputs[-1])
        owed = owed_in_total(states_of_all_ranks(optimizer), parameters)
        arrived = {name: sum(output[name].double() for output in outputs) + owed[name] for name in parameters}
        sent = [summed(step, parameters) for step in range(3)]
        assert_close(arrived, {name: sum(total[name] for total in sent) for name in parameters}, 2e-6)
        one_node = len(nodes) == 1
        assert one_node == all(float(tensor.abs().sum()) == 0 for tensor in owed.values())


def check_nodes_are_horovods_hosts():
    parameters = make_parameters()
    optimizer = wrap(parameters, compressors.get("hierarchical", outer={"name": "onebit"}), op=hvd.Sum)
    assert_close(exchange(optimizer, parameters, 0), summed(0, parameters), 1e-6)  # this machine is one node
    assert optimizer.ledger.bytes_between == 0


def check_the_ledger_counts_both_levels():
    if hvd.size() < 4:
        return
    parameters = make_parameters({"weight": (512, 512)})
    numel = 512 * 512
    optimizer = wrap(parameters, two_levels("onebit", "fp16"))
    for step in range(2):
        exchange(optimizer, parameters, step)
    ledger = optimizer.ledger
    packed = 4 + numel // 2 // 2 // 8  # a slice of a share
    assert ledger.bytes_between == 2 * packed
    votes = 2 * 6  # one on gradients, one on sums, of 4 bytes on 4 ranks
    assert ledger.bytes_sent - ledger.bytes_between == 2 * numel // 2 + 2 * numel // 2 + votes
    assert ledger.total.bytes_between == 2 * ledger.bytes_between
    assert ledger.total.bytes_sent == 2 * ledger.bytes_sent


def check_other_nodes_and_flat_exchanges_take_up_what_is_owed():
    """From two nodes to others, to none, and to fewer ranks: the sum of what is owed stays the same."""
    if hvd.size() < 4:
        return
    pair = process_set([0, 1])
    everyone = hvd.global_process_set
    for outer in (compressors.OneBit(), compressors.TopK(0.05, exchange="two_phase", momentum=0.5)):
        parameters = make_parameters()
        optimizer = wrap(parameters, compressors.Hierarchical(outer=outer, nodes=[[0, 1], [2, 3]]))
        for step in range(3):
            exchange(optimizer, parameters, step)
        states = states_of_all_ranks(optimizer)
        owed = owed_in_total(states, parameters)
        for compression, options in (
            (compressors.Hierarchical(outer=outer, nodes=ODD), {}),
            (compressors.Hierarchical(outer=outer, nodes=[[0, 1], [2, 3]]), {"bucket_bytes": 4 * 2500}),
            (outer, {}),
            (compressors.Hierarchical(outer=outer, nodes=[[0], [1]]), {"process_set": pair}),
        ):
            members = options.get("process_set", everyone)
            again = wrap(make_parameters(), compression, **options)
            if members.included():
                again.load_compression_state_dict(states)
            taken = states_of_all_ranks(again)[: len(members.ranks)]
            assert_close(owed_in_total(taken, parameters), owed, 1e-6)


def check_one_ranks_state_is_enough_only_for_the_same_shares():
    if hvd.size() < 4:
        return
    state = wrap(make_parameters(), two_levels("onebit")).compression_state_dict()
    other = wrap(make_parameters(), compressors.Hierarchical(outer=compressors.OneBit(), nodes=ODD))
    with pytest.raises(ValueError, match="shares of nodes: give the list of all ranks' states"):
        other.load_compression_state_dict(state)


def check_sums_beyond_the_largest_number_skip_the_step_everywhere():
    """The gradients are finite on each rank; a node's sum, or its code, is not."""
    if hvd.size() < 4:
        return
    for compression, large in ((two_levels("randomk"), 3e38), (two_levels("onebit", "fp16"), 1e30)):
        parameters = make_parameters()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        optimizer = wrap(parameters, compression, op=hvd.Sum)
        factor = large if hvd.rank() < 2 else 1.0
        sum((p * factor).sum() for p in parameters.values()).backward()
        optimizer.step()
        assert all(p.grad.isnan().all() for p in parameters.values())
        assert_equal({name: p.detach() for name, p in parameters.items()}, before)
        assert not any(r.any() for r in optimizer.compression_state_dict()["residuals"].values())
        assert_close(owed_in_total(states_of_all_ranks(optimizer), parameters), {}, 0)


def check_topk_adam_chooses_by_weight_in_its_share():
    parameters = make_parameters()
    optimizer = compressors.TopKAdam(list(parameters.values()), lr=0.01, freeze_step=2)
    optimizer = wrap(parameters, two_levels("topk", density=0.05, momentum=0.9), optimizer)
    for step in range(5):
        exchange(optimizer, parameters, step)
        with optimizer.skip_synchronize():
            optimizer.step()
        must_be_the_same(f"step {step}", parameters)


def check_nodes_that_cannot_be_are_refused():
    ranks = list(range(hvd.size()))
    if len(ranks) > 1:
        for nodes in ([ranks, ranks], [[*ranks, len(ranks)]], [ranks[:-1]]):
            with pytest.raises(ValueError, match="must have each of the ranks"):
                wrap(make_parameters(), compressors.Hierarchical(nodes=nodes))


def check_process_sets_that_cannot_be_made_are_refused():
    def refuse(ranks) -> None:
        raise ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "add_process_set", refuse)
        with pytest.raises(ValueError, match=r"ranks \[1, 2, 3\] cannot be made: set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            process_set([1, 2, 3])
    with pytest.raises(ValueError, match=r"made at the start: hvd.init\(process_sets="):
        process_set([1, 2, 3], may_add=False)
