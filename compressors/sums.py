"""What an exchange comes to, on its way into the gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressors.buckets import Bucket, cut
from compressors.codec import Codec, Frame
from compressors.exchange import Pending, Wire
from compressors.kernels import Finite


@dataclass(frozen=True)
class CodedSum:
    """A sum over ranks as it came: a payload for each slice of a bucket, equal on all ranks."""

    codec: Codec
    payloads: Sequence[Tensor]
    slices: Sequence[Frame]
    wire: Wire

    def decoded(self) -> Tensor:
        """Flat float32, to be used before another sum of this wire is decoded."""
        sizes = [piece.numel for piece in self.slices]
        out = self.wire.scratch(sum(sizes), self.payloads[0].device)
        for payload, piece, target in zip(self.payloads, self.slices, out.split(sizes), strict=True):
            self.codec.decode_into(payload, piece, target)
        return out


Sum = Tensor | CodedSum
"""Flat values, or what they are decoded from."""
Exchange = Generator[Pending, Any, Sum]
"""The exchange of one bucket; see `exchange`. Its sum is to be used before another exchange goes on."""


def values_of(total: Sum) -> Tensor:
    """The flat values."""
    return total.decoded() if isinstance(total, CodedSum) else total


def write(total: Sum, bucket: Bucket, factor: float) -> Finite:
    """Set the gradients of `bucket` to ``total * factor``; returns whether all are finite."""
    # On CPUs a pass over memory is dear and a call cheap: each slice's part of each gradient is decoded in its place.
    in_place = isinstance(total, CodedSum) and bucket.device.type == "cpu"
    targets = bucket.flat_gradients() if in_place else None
    if isinstance(total, Tensor) or targets is None:
        return bucket.write(values_of(total), factor)
    answers = [
        total.codec.decode_apart(payload, piece, factor, parts)
        for payload, piece, parts in zip(total.payloads, total.slices, cut(targets, total.slices), strict=True)
    ]
    return all(answers)
