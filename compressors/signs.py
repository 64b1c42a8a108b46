"""The exchange of signs in as few passes over memory as there can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import kernels
from compressors.buckets import Bucket
from compressors.channels import CodecChannel, Stage
from compressors.codec import Frame
from compressors.codecs.onebit import OneBit
from compressors.exchange import Wire
from compressors.feedback import SignResidual
from compressors.kernels import Finite


class OneBitChannel(CodecChannel):
    """The exchange of one bucket's signs, which are taken, and their scales summed up, while values are loaded."""

    residual: SignResidual
    owed: SignResidual | None

    def __init__(self, bucket: Bucket, codec: OneBit, wire: Wire) -> None:
        super().__init__(bucket, codec, wire)
        self._onebit = codec

    def _new_residual(self, slices: Sequence[Frame]) -> SignResidual:
        return SignResidual(tuple(size for piece in slices for size in piece.sizes), self.bucket.device)

    def load(self, inverse_scale: float, stage: Stage) -> Finite:
        self.residual.begin()
        if self.owed is not None:
            self.owed.begin()
        if stage.dense:
            return super().load(inverse_scale, stage)
        self._dense_stage = False
        self._values = self.residual.draft
        slices = self.bucket.frame(0, self.wire.ranks, self.wire.rank).slices()
        fields = [_fields(each, piece) for each, piece in zip(self._payloads(slices), slices, strict=True)]
        bits = [signs for _, signs in fields]
        sums, finite = self.bucket.read_signs(slices, inverse_scale, self.residual, stage.outgoing, bits)
        scales = kernels.means(sums, tuple(size for piece in slices for size in piece.sizes))
        for (header, _), part in zip(fields, scales.split([len(piece.sizes) for piece in slices]), strict=True):
            header.copy_(part.view(torch.uint8))
        self.residual.draft_sent = scales
        return finite

    def alone(self) -> Tensor:
        self.residual.begin()
        return super().alone()

    def _encode_slices(self, values: Tensor, frame: Frame) -> list[Tensor]:
        return self._payloads(frame.slices())  # in which load() wrote them

    def _merge(self, parts: list[Tensor], own: Frame) -> Tensor:
        assert self.owed is not None
        (merged,) = self._payloads([dataclasses.replace(own, phase=1)])
        header, bits = _fields(merged, own)
        coming = [self._onebit.fields(part, own) for part in parts]
        where = (self.owed.before, self.owed.sent, own.sizes, self.owed.draft, bits)
        self.owed.draft_sent = kernels.means(kernels.merge_signs(coming, *where), own.sizes)
        header.copy_(self.owed.draft_sent.view(torch.uint8))
        return merged


def _fields(payload: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """Where in `payload` the bytes of the scales are to be written, and the bits."""
    begin = 4 * len(frame.sizes)
    return payload[:begin], payload[begin:]
