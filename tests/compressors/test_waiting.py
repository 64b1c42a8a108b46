"""What runs in backward's hooks tells the host nothing: on the meta device, from which nothing can be read."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import compressors
from compressors.buckets import Bucket
from compressors.channels import Stage
from compressors.codec import Compressor
from compressors.codecs.none import DenseBuckets
from compressors.reducer import _open_channel
from compressors.vetoes import holds, veto

META = torch.device("meta")


class Recorder:
    """A wire of two ranks that keeps what is to be sent."""

    ranks = 2
    rank = 0

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor, name):
        self.sent.append(tensor)
        return self

    def all_gather(self, part, name, total_bytes=None):
        self.sent.append(part)
        return self

    def all_to_all(self, parts, name):
        self.sent += parts
        return self


def _submit(compressor: Compressor, stage: Stage) -> tuple[Recorder, object]:
    parameters = []
    for name, shape in (("a", (300, 70)), ("b", (41, 3))):
        parameter = Parameter(torch.empty(shape, device=META))
        parameter.grad = torch.empty_like(parameter)
        parameters.append((name, parameter))
    wire = Recorder()
    channel = _open_channel(Bucket(0, compressor, tuple(parameters)), compressor, wire)
    finite = channel.load(0.5, stage)
    assert next(channel.run(1)) is wire
    return wire, finite


COMPRESSORS = {
    "dense": DenseBuckets(),
    "fp16": compressors.get("fp16"),
    "bf16": compressors.get("bf16"),
    "onebit": compressors.OneBit(),
    "int8": compressors.QSGD(),
    "int8 with feedback": compressors.ErrorFeedback(compressors.QSGD()),
    "topk gathered": compressors.TopK(0.1, values="float16", exchange="all_gather"),
    "topk corrected": compressors.TopK(0.1, momentum=0.9, exchange="all_gather"),
    "powersgd": compressors.PowerSGD(),
}


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("dense", [False, True])
def test_hooks_do_not_wait_for_the_device(compressor, dense):
    wire, finite = _submit(compressor, Stage(dense=dense))
    assert wire.sent
    assert all(tensor.device == META for tensor in wire.sent)
    vote = veto([True, finite])
    assert (vote.device, vote.dtype, vote.shape) == (META, torch.int32, (1,))


def test_top_k_for_the_owners_of_slices_must_wait():
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        _submit(compressors.TopK(0.1, exchange="two_phase"), Stage())


@pytest.mark.parametrize("answers", [[True, True], [True, False], [False]])
def test_answers_put_together(answers):
    for mixed in (answers, [torch.tensor(answer) for answer in answers], [True, *map(torch.tensor, answers)]):
        assert holds(mixed) == all(answers)
        assert veto(mixed).tolist() == [not all(answers)]
        assert veto(mixed).dtype == torch.int32
