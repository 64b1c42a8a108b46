"""What a rank computes in a step, timed without training anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from hvd_novel.checkpoint import state
from hvd_novel.config import ComputeConfig
from hvd_novel.sharding.packing import Pack
from hvd_novel.train.step import pack_loss
from hvd_novel.tuning.measure import slowest
from hvd_novel.tuning.model import Work

_ROUNDS = 3
_ENOUGH = 2.0  # seconds of timed packs, in each


class Workload:
    """The packs of one step of this rank. Parameters, gradients and random numbers stay as they are."""

    def __init__(self, model: PreTrainedModel, packs: Sequence[Pack], compute: ComputeConfig) -> None:
        self._model, self._packs, self._compute = model, packs, compute
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run(self) -> tuple[float, float]:
        """Go through the first pack; returns the seconds forward and backward, 0 without packs."""
        return self._pass(self._packs[0]) if self._packs else (0.0, 0.0)

    def measure(self, *, overlap: bool) -> Work:
        """Seconds for all packs, medians of `_ROUNDS` times of the slowest rank; all ranks call this.

        Of many packs the first ones are timed. `overlap` tells whether gradients travel during the backward pass of
        the last pack; what counts there is the rank with the shortest.
        """
        self.run()
        times = []
        for _ in range(_ROUNDS):
            seconds, last = self._round()
            times.append((slowest(seconds), -slowest(-last)))
        seconds, hides = (statistics.median(column) for column in zip(*times, strict=True))
        return Work(seconds, hides if overlap else 0.0)

    def _round(self) -> tuple[float, float]:
        """Seconds of all packs, and of the last one's backward pass."""
        forward = backward = 0.0
        tokens = 0
        for pack in self._packs:
            there, back = self._pass(pack)
            forward, backward = forward + there, backward + back
            tokens += len(pack.labels)
            if forward + backward > _ENOUGH:
                break
        if not tokens:
            return 0.0, 0.0
        share = sum(len(pack.labels) for pack in self._packs) / tokens
        return (forward + backward) * share, backward * len(self._packs[-1].labels) / tokens

    def _pass(self, pack: Pack) -> tuple[float, float]:
        with _same_random_numbers(), torch.enable_grad():
            start = time.perf_counter()
            loss = pack_loss(self._model, pack, self._compute)
            float(loss.detach())  # waits for the device
            middle = time.perf_counter()
            # Not backward(): gradients stay out of the parameters, and hooks do not run.
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
            end = time.perf_counter()
            del gradients
        return middle - start, end - middle


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    random = state.random_state()
    try:
        yield
    finally:
        state.set_random_state(random)
