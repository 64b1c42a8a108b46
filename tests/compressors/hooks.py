"""What runs in backward's hooks, without Horovod: from gradients to the first operation of an exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

import compressors
from compressors.buckets import Bucket
from compressors.channels import Channel, Stage
from compressors.codec import Compressor
from compressors.codecs.none import DenseBuckets
from compressors.kernels import Finite
from compressors.reducer import _open_channel

SILENT = {
    "dense": DenseBuckets(),
    "fp16": compressors.get("fp16"),
    "bf16": compressors.get("bf16"),
    "onebit": compressors.OneBit(),
    "int8": compressors.QSGD(),
    "int8 with feedback": compressors.ErrorFeedback(compressors.QSGD()),
    "topk gathered": compressors.TopK(0.1, values="float16", exchange="all_gather"),
    "topk corrected": compressors.TopK(0.1, momentum=0.9, exchange="all_gather"),
}
"""Compressors whose hooks do not wait for the device."""


class Recorder:
    """A wire of two ranks that keeps what is to be sent."""

    ranks = 2
    rank = 0

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Recorder:
        self.sent.append(tensor)
        return self

    def all_gather(self, part: torch.Tensor, name: str, total_bytes: int) -> Recorder:
        self.sent.append(part)
        return self

    def all_to_all(self, parts: list[torch.Tensor], name: str) -> Recorder:
        self.sent += parts
        return self


def open_channel(compressor: Compressor, device: torch.device) -> tuple[Channel, Recorder]:
    """The channel of a bucket of two parameters, with gradients of anything, and its wire."""
    parameters = []
    for name, shape in (("a", (300, 70)), ("b", (41, 3))):
        parameter = Parameter(torch.zeros(shape, device=device))
        parameter.grad = torch.ones_like(parameter)
        parameters.append((name, parameter))
    wire: Any = Recorder()
    return _open_channel(Bucket(0, compressor, tuple(parameters)), compressor, wire), wire


def submit(channel: Channel, stage: Stage) -> Finite:
    """Load the channel and run it to its first operation; returns whether gradients are finite."""
    finite = channel.load(0.5, stage)
    next(channel.run(1))
    return finite
