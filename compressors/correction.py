"""Momentum correction and masking for top-k, and choosing by weighted magnitude.

Lin et al. 2018, "Deep gradient compression", section 3.2 (momentum correction, momentum factor masking): momentum is
made of a rank's own gradients before they are accumulated, and forgotten where it was sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.buckets import Bucket
from compressors.channels import CodecChannel, Stage
from compressors.codec import Frame
from compressors.codecs.topk import TopK
from compressors.exchange import Wire
from compressors.feedback import Residual
from compressors.kernels import Finite


class TopKChannel(CodecChannel):
    """The exchange of one bucket's top-k entries: ``u = momentum u + g``, send the largest of ``residual + u``."""

    def __init__(self, bucket: Bucket, codec: TopK, wire: Wire) -> None:
        super().__init__(bucket, codec, wire)
        self._topk = codec
        self._weights: Tensor | None = None
        if codec.momentum:
            self.momentum = Residual(bucket.numel, bucket.device)

    def load(self, inverse_scale: float, stage: Stage) -> Finite:
        self._weights = None
        if stage.weights is not None:
            weights = [stage.weights(parameter) for _, parameter in self.bucket.parameters]
            if all(weight is not None for weight in weights):
                self._weights = torch.cat([weight.reshape(-1) for weight in weights if weight is not None])
        if self.momentum is None:
            return super().load(inverse_scale, stage)
        if stage.dense:
            self.momentum.draft.copy_(self.momentum.value)
            return super().load(inverse_scale, stage)
        assert self.residual is not None
        self._dense_stage = False
        own = torch.mul(self.momentum.value, self._topk.momentum, out=self.momentum.draft)
        _, finite = self.bucket.read(own, inverse_scale, own, stage.outgoing)
        self._values = torch.add(self.residual.value, own, out=self.residual.draft)
        return finite

    def _encode(self, values: Tensor, frame: Frame) -> Tensor:
        return self._topk.encode_error(values, frame, self._choose(values, frame))

    def _encode_slices(self, values: Tensor, frame: Frame) -> list[Tensor]:
        return self._topk.encode_slices(values, frame, [], self._choose(values, frame))

    def _choose(self, values: Tensor, frame: Frame) -> Tensor:
        weights = self._weights
        if weights is not None and frame.phase == 1:
            weights = weights.split([piece.numel for piece in self.bucket.frame(0, frame.ranks, 0).slices()])[
                frame.rank
            ]
        chosen = self._topk.choose(values if weights is None else values * weights, frame)
        if self.momentum is not None and frame.phase == 0:
            self.momentum.draft.index_fill_(0, chosen, 0.0)
        return chosen
