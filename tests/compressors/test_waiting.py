"""What runs in backward's hooks tells the host nothing: on the meta device, from which nothing can be read."""

from __future__ import annotations

import pytest
import torch

import compressors
from compressors.channels import Stage
from compressors.vetoes import holds, veto
from tests.compressors.hooks import SILENT, open_channel, submit

META = torch.device("meta")


@pytest.mark.parametrize("name", [*SILENT, "powersgd"])
@pytest.mark.parametrize("dense", [False, True])
def test_hooks_do_not_wait_for_the_device(name, dense):
    channel, wire = open_channel(SILENT.get(name, compressors.PowerSGD()), META)
    finite = submit(channel, Stage(dense=dense))
    assert wire.sent
    assert all(tensor.device == META for tensor in wire.sent)
    vote = veto([True, finite], META)
    assert (vote.device, vote.dtype, vote.shape) == (META, torch.int32, (1,))


def test_top_k_for_the_owners_of_slices_must_wait():
    channel, _ = open_channel(compressors.TopK(0.1, exchange="two_phase"), META)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        submit(channel, Stage())


@pytest.mark.parametrize("answers", [[True, True], [True, False], [False]])
def test_answers_put_together(answers):
    for mixed in (answers, [torch.tensor(answer) for answer in answers], [True, *map(torch.tensor, answers)]):
        assert holds(mixed) == all(answers)
        vote = veto(mixed, torch.device("cpu"))
        assert (vote.dtype, vote.tolist()) == (torch.int32, [not all(answers)])
