"""Sums decoded in place, and residuals that are computed late, against the plain ways to do it; without Horovod."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import compressors
from compressors import sums
from compressors.buckets import cut, make_buckets
from compressors.channels import Stage
from compressors.codec import Codec, Frame
from compressors.ledger import Ledger
from compressors.reducer import Reducer
from compressors.rehearsal import _Echo
from compressors.sums import CodedSum, values_of

SHAPES = {"a": (40, 30), "b": (7, 3), "c": (1, 1), "d": (64, 65)}


class Eager(compressors.OneBit):
    """A codec of the same payloads, for which a plain channel is opened."""


class Job:
    """Steps of one rank of three, which all have the same gradients."""

    def __init__(self, compressor: Codec) -> None:
        self.parameters = [(name, Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
        buckets = make_buckets(self.parameters, lambda name, parameter: compressor, 4 * 4000)
        ledger = Ledger()
        self.wire = _Echo(3, ledger)
        self.stage = Stage()
        self.reducer = Reducer(buckets, self.wire, ledger, average=True, scale=lambda: 1.0, stage=lambda: self.stage)

    def step(self, seed: int, bad: float = 0.0) -> list[torch.Tensor]:
        """Sums, and what is remembered after them."""
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad[0, 0] += bad
        self.wire.start()
        for _, parameter in reversed(self.parameters):
            self.reducer.ready(parameter)
        self.reducer.finish()
        return [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]

    def remembered(self) -> list[torch.Tensor]:
        kept = [kept for channel in self.reducer.channels for kept in (channel.residual, channel.owed)]
        return [each.value.clone() for each in kept if each is not None]


def test_signs_whose_residual_is_computed_late():
    late, plain = Job(compressors.OneBit()), Job(Eager())
    for step in range(9):
        for job in (late, plain):
            job.stage = Stage(dense=step in (0, 5))
        bad = float("inf") if step == 3 else 0.0
        for ours, theirs in zip(late.step(step, bad), plain.step(step, bad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        if step % 2:  # looking at them changes nothing
            for ours, theirs in zip(late.remembered(), plain.remembered(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_single_rank_owes_nothing():
    job = Job(compressors.OneBit())
    job.step(0)
    owed = job.remembered()[0]
    assert owed.count_nonzero()
    (channel, *_) = job.reducer.channels
    channel.load(1.0, Stage())
    gradients = torch.cat([parameter.grad.view(-1) for _, parameter in channel.bucket.parameters])
    torch.testing.assert_close(channel.alone(), gradients + owed)
    channel.commit()
    assert channel.residual is not None
    assert not channel.residual.value.count_nonzero()


CODECS = {
    "onebit": compressors.OneBit(),
    "int8": compressors.QSGD(),
    "topk": compressors.TopK(0.05),
    "topk float16": compressors.TopK(0.05, values="float16"),
    "bf16": compressors.get("bf16"),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bad", [0.0, float("inf")])
def test_decoded_in_place(codec, bad):
    parameters = [(name, Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    (bucket,) = make_buckets(parameters, lambda name, parameter: codec, 2**20)
    slices = bucket.frame(1, 3, 0).slices()
    values = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0))
    parts = values.split([piece.numel for piece in slices])
    payloads = [codec.encode(part, piece) for part, piece in zip(parts, slices, strict=True)]
    if bad:
        where = slice(-4, None) if codec is CODECS["topk"] else slice(4)  # a scale, or values
        payloads[1].view(torch.uint8)[where] = torch.tensor([bad]).view(torch.uint8)
    total = CodedSum(codec, payloads, slices, _Echo(3, Ledger()))
    whole = values_of(total) * 0.25
    finite = sums.write(total, bucket, 0.25)
    written = torch.cat([parameter.grad.view(-1) for _, parameter in bucket.parameters if parameter.grad is not None])
    assert finite == (not bad)
    if finite:
        torch.testing.assert_close(written, whole, rtol=1e-6, atol=0)


def test_tensors_cut_by_slices():
    frame = Frame((3, 1, 6), 0, 3)
    tensors = [torch.arange(3), torch.empty(0), torch.tensor([3]), torch.arange(4, 10)]
    parts = [[part.tolist() for part in parts] for parts in cut(tensors, frame.slices())]
    assert parts == [[[0, 1, 2]], [[3], [4, 5]], [[6, 7, 8, 9]]]
    assert list(cut([torch.tensor([5])], Frame((1,), 0, 3).slices()))[2] == [torch.tensor([5])]
