"""One exchange of all gradients, from the first that is ready to the sums in ``.grad``.

A step is a transaction. If any rank's gradient is not finite, or a sum is not, every rank finds out, nothing that
is remembered changes, and all gradients become NaN, which clipping and loss scalers understand.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from compressors import kernels
from compressors.buckets import Bucket, gradient
from compressors.channels import Channel, CodecChannel, CooperativeChannel, RowsChannel, Stage
from compressors.codec import Codec, Compressor, Cooperative
from compressors.codecs.onebit import OneBit
from compressors.codecs.rows import SparseRows
from compressors.codecs.topk import TopK
from compressors.correction import TopKChannel
from compressors.exchange import Pending, Wire
from compressors.hierarchy import Hierarchical, open_hierarchy
from compressors.ledger import Ledger, ring_all_reduce_bytes
from compressors.signs import OneBitChannel
from compressors.sums import Exchange, Sum, write
from compressors.vetoes import holds, home, veto


def _open_channel(bucket: Bucket, compressor: Compressor, wire: Wire) -> Channel:
    if isinstance(compressor, Hierarchical):
        return open_hierarchy(bucket, compressor, wire, _open_channel)
    if isinstance(compressor, TopK):
        return TopKChannel(bucket, compressor, wire)
    if type(compressor) is OneBit:  # not a subclass, which may code otherwise
        return OneBitChannel(bucket, compressor, wire)
    if isinstance(compressor, Codec):
        return CodecChannel(bucket, compressor, wire)
    if isinstance(compressor, SparseRows):
        return RowsChannel(bucket, compressor, wire)
    assert isinstance(compressor, Cooperative)
    return CooperativeChannel(bucket, compressor, wire)


def _open_warm_up(bucket: Bucket, warm_up: Codec, wire: Wire) -> Channel:
    """The channel that has `warm_up` in the place of the bucket's compressor."""
    former = bucket.compressor
    own = Hierarchical(former.inner, warm_up, former.nodes) if isinstance(former, Hierarchical) else warm_up
    return _open_channel(dataclasses.replace(bucket, compressor=own), own, wire)


class _Task:
    """An exchange under way in one channel."""

    def __init__(self, channel: Channel, exchange: Exchange) -> None:
        self.channel = channel
        self.total: Sum | None = None
        self._exchange = exchange
        self.pending: Pending | None = next(exchange)

    def advance(self, result: object) -> None:
        """Go on with the result of `pending`, to the next operation or to `total`."""
        try:
            self.pending = self._exchange.send(result)
        except StopIteration as end:
            self.pending, self.total = None, end.value


class Reducer:
    """Sums (or averages) gradients over the ranks of `wire`, bucket by bucket, as they get ready.

    `scale` gives the factor by which gradients are multiplied (the loss scale), `stage` what is to be exchanged; both
    are asked at the first gradient of a step. `warm_up`, which remembers nothing, carries what is not to be compressed
    yet in the place of float32.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        wire: Wire,
        ledger: Ledger,
        *,
        average: bool,
        scale: Callable[[], float],
        stage: Callable[[], Stage],
        warm_up: Codec | None = None,
    ) -> None:
        self.channels: list[Channel] = [_open_channel(bucket, bucket.compressor, wire) for bucket in buckets]
        self._warm_ups: dict[Channel, Channel] = {}
        if warm_up is not None:
            apart = wire.apart("warm_up")
            lossy = [channel for channel in self.channels if channel.bucket.compressor.skips_small]
            self._warm_ups = {channel: _open_warm_up(channel.bucket, warm_up, apart) for channel in lossy}
        for channel in (*self.channels, *self._warm_ups.values()):
            channel.runs_at_once = True
        self.steps = 0
        """Exchanges completed; skipped steps do not count."""
        self.skipped = False
        """Whether the last exchange met a gradient that is not finite."""
        self._wire = wire
        self._ledger = ledger
        self._average = average
        self._loss_scale = scale
        self._next_stage = stage
        self._channel_of = {
            parameter: channel for channel in self.channels for _, parameter in channel.bucket.parameters
        }
        self._numel = sum(bucket.numel for bucket in buckets)
        self._home = home(bucket.device for bucket in buckets)
        self._lock = threading.RLock()
        self._bucketed = any(bucket.compressor.bucketed for bucket in buckets)
        self.reset()

    @property
    def waiting(self) -> list[Compressor]:
        """The compressors in whose place `warm_up` may work."""
        return [channel.bucket.compressor for channel in self._warm_ups]

    @property
    def under_way(self) -> bool:
        """Whether gradients of a step are ready or on their way."""
        return bool(self._ready)

    @torch.no_grad()
    def abandon(self) -> None:
        """Forget the step under way. All ranks call this together.

        What all have begun comes to its end first, so that no operation of it is taken for one of the next step.
        """
        if self._tasks and len(self._tasks) == len(self.channels):
            if self._vote is not None:
                self._vote.wait()
            self._drive()
        self.reset()

    def reset(self) -> None:
        """Forget the step under way, on this rank."""
        self._ready: set[Parameter] = set()
        self._missing = {channel: len(channel.bucket.parameters) for channel in self.channels}
        self._tasks: list[_Task] = []
        self._chains: list[_Task] = []
        """Those of which an operation is under way that another one follows."""
        self._vote: Pending | None = None
        self._finite: list[kernels.Finite] = []
        self._written: list[kernels.Finite] = []
        self._scale = 1.0
        self._stage = Stage()

    def takes_rows(self, parameter: Parameter) -> bool:
        """Whether of `parameter` those rows travel that were used."""
        channel = self._channel_of.get(parameter)
        return channel is not None and isinstance(channel.bucket.compressor, SparseRows)

    @torch.no_grad()
    def ready(self, parameter: Parameter) -> None:
        """The gradient of `parameter` will not change any more: send its bucket if it was the last one of it.

        Buckets whose first operation has ended go on to the second. Never waits for other ranks. Buckets become ready
        in different orders on different ranks.
        """
        channel = self._channel_of.get(parameter)
        if channel is not None and self._wire.ranks > 1:
            with self._lock:  # backward has a thread for each device
                self._take(parameter, channel)

    def _take(self, parameter: Parameter, channel: Channel) -> None:
        if not self._ready:
            self._scale, self._stage = self._loss_scale(), self._next_stage()
        assert parameter not in self._ready, "gradient sent twice in a step"
        self._ready.add(parameter)
        self._missing[channel] -= 1
        if not self._missing[channel]:
            self._launch(channel)
        for task in self._chains:
            if task.pending is not None and task.pending.done():
                self._advance(task)
        self._chains = [task for task in self._chains if task.pending is not None]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the gradients are the sums over ranks. Every gradient must be ready."""
        if self._wire.ranks == 1:
            self.skipped = not self._complete_alone()
            self.steps += not self.skipped
            self._ledger.close_step(0)
        elif self._ready:
            assert len(self._tasks) == len(self.channels), "finish() before every gradient was ready"
            self.skipped = not self._complete()
            self.steps += not self.skipped
            self._ledger.close_step(ring_all_reduce_bytes(4 * self._numel, self._wire.ranks))
            self.reset()

    def _complete_alone(self) -> bool:
        held = [parameter.grad for parameter in self._channel_of if parameter.grad is not None]
        if not holds(kernels.all_finite(grad) for grad in held):
            return False
        stage = self._next_stage()
        if stage == Stage():  # else the optimizer makes its own momentum
            scale = self._loss_scale()
            for channel in self.channels:
                if isinstance(channel, TopKChannel) and channel.momentum is not None:
                    channel.load(1.0 / scale, stage)
                    channel.bucket.write(channel.alone(), scale)
                    channel.commit()
        return True

    def _launch(self, channel: Channel) -> None:
        warm_up = self._warm_ups.get(channel)
        stage = self._stage
        if warm_up is not None and (stage.dense or channel.bucket.compressor.starts_dense(self.steps)):
            channel, stage = warm_up, dataclasses.replace(stage, dense=False)
        elif warm_up is not None:
            warm_up.release()
        with self._ledger.timed("encode"):
            self._finite.append(channel.load(1.0 / self._scale_of(channel), stage))
            self._tasks.append(task := _Task(channel, channel.run(self.steps)))
        if channel.goes_on:
            self._chains.append(task)
        # Gradients that are sent as they are show in the sum that they are not finite; all others need a vote.
        needs_vote = self._bucketed or self._stage.outgoing is not None
        if needs_vote and len(self._tasks) == len(self.channels):
            self._vote = self._wire.all_reduce(veto(self._finite, self._home), "vetoes")

    def _complete(self) -> bool:
        self._drive()  # also if there is a veto: of some buckets this or another rank is further already
        vetoes = 0
        if self._vote is not None:
            with self._ledger.timed("exchange"):
                vetoes = int(self._vote.wait())
        if vetoes or not holds(self._written):  # all ranks hold the same bits and come to the same answer
            return self._spoil()
        for task in self._tasks:
            task.channel.commit()
        return True

    def _drive(self) -> None:
        """Go from phase to phase: the next operations of all buckets are submitted before any is waited for.

        Sums are written to the gradients as they come, not before: backward may still need their memory.
        """
        tasks = sorted(self._tasks, key=lambda task: task.channel.bucket.index)
        while tasks:
            for task in tasks:
                if task.pending is not None:
                    self._advance(task)
                if task.total is not None:
                    with self._ledger.timed("decode"):
                        self._written.append(self._write(task.channel, task.total))
                    task.total = None
            tasks = [task for task in tasks if task.pending is not None]

    def _advance(self, task: _Task) -> None:
        """Wait for the operation under way, and submit the next one or take the sum."""
        assert task.pending is not None
        with self._ledger.timed("exchange"):
            result = task.pending.wait()
        with self._ledger.timed("decode"):
            task.advance(result)

    def _write(self, channel: Channel, total: Sum) -> kernels.Finite:
        factor = self._scale_of(channel) / (self._wire.ranks if self._average else 1)
        return write(total, channel.bucket, factor)

    def _spoil(self) -> bool:
        for parameter in self._channel_of:
            gradient(parameter).fill_(float("nan"))
        return False

    def _scale_of(self, channel: Channel) -> float:
        return self._scale if channel.unscales or self._stage.outgoing is not None else 1.0
