"""``compression: {name: auto}``: the compressor is chosen at the start of a run, and reconsidered from time to time.

First each safe scheme's step is predicted from what the link, coding and packs are measured to take. Those that come
near the fastest are then tried in turns, in steps of the run itself: they train alike, so nothing is lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

import compressors
from hvd_novel.train.workload import Workload
from hvd_novel.tuning.measure import measure_coding, measure_link, slowest
from hvd_novel.tuning.model import predict
from hvd_novel.tuning.schemes import DENSE, SAFE, SCHEMES, choose

_NEAR = 1.25
"""What is predicted to take longer than so many times the fastest is not tried."""
_TURNS, _BLOCK = 4, 3
"""Each scheme is tried in `_TURNS` blocks of `_BLOCK` steps, of which the first does not count."""
_HOPELESS = 1.1
"""What a scheme may take, after each turn, in times of the fastest, without being left out of the next."""

Decision = dict[str, Any]
"""Values of a ``compression`` record."""


class Auto:
    """The scheme in force in a run. Every rank has one, and they decide alike.

    `forecast` gives the seconds of a step under each safe scheme, from measurements made by all ranks together.
    `recheck_every`: steps between reconsiderations, 0 for none.
    """

    def __init__(
        self, optimizer: Any, forecast: Callable[[], dict[str, float]], *, ranks: int, recheck_every: int
    ) -> None:
        self.name = DENSE
        """The scheme in force."""
        self._optimizer, self._forecast = optimizer, forecast
        self._ranks, self._every = ranks, recheck_every
        self._settled = False
        self._considered = -1  # step before which that was done last
        self._trial: _Trial | None = None

    def before_step(self, step: int) -> Decision | None:
        """Put the scheme of step `step` (from 0) into force; returns what was decided, if anything was."""
        decision = None
        if self._due(step):
            self._considered = step
            decision = self._consider()
        if self._trial is not None:
            self._use(self._trial.scheme)
        return decision

    def after_step(self, seconds: float, tokens: int) -> Decision | None:
        """Take the time of the step; returns what was decided, if that ended a trial."""
        if self._trial is None:
            return None
        times = self._trial.observe(seconds, tokens)
        if times is None:
            return None
        self._trial = None
        return self._settle(choose(times), "tried", times)

    def state_dict(self) -> dict[str, Any]:
        """The scheme in force, as JSON values; a trial under way begins anew after resuming."""
        return {"name": self.name, "settled": self._settled, "ranks": self._ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scheme that was in force; on another number of ranks it is reconsidered at once."""
        self._use(state["name"])
        self._settled = state["settled"] and state["ranks"] == self._ranks

    def _due(self, step: int) -> bool:
        if self._trial is not None or step == self._considered:
            return False
        return not self._settled or (self._every > 0 and step > 0 and step % self._every == 0)

    def _consider(self) -> Decision:
        if self._ranks == 1:
            return self._settle(DENSE, "nothing is sent", {})
        times = self._forecast()
        fastest = min(times.values())
        near = [name for name in times if times[name] <= _NEAR * fastest]
        if len(near) == 1:
            return self._settle(near[0], "predicted", times)
        self._settled, self._trial = False, _Trial(near)
        return {"name": self.name, "how": f"predicted, trying {', '.join(near)}", **times}

    def _settle(self, name: str, how: str, times: dict[str, float]) -> Decision:
        self._use(name)
        self._settled = True
        return {"name": name, "how": how, **times}

    def _use(self, name: str) -> None:
        if name != self.name:
            self._optimizer.set_compression(compressors.get(**SCHEMES[name]))
            self.name = name


class _Trial:
    """Steps under several schemes in turns."""

    def __init__(self, schemes: Sequence[str]) -> None:
        self._taken: dict[str, list[float]] = {name: [] for name in schemes}
        self._tokens: list[int] = []
        self._seconds: dict[str, float] = {}
        self._turns = _TURNS
        self._begin_turn(schemes)

    @property
    def scheme(self) -> str:
        """That of the next step."""
        return self._steps[0][0]

    def observe(self, seconds: float, tokens: int) -> dict[str, float] | None:
        """Take the time of a step; after the last one, returns the seconds of a step of mean size under each scheme.

        All ranks call this together, and get those of the slowest rank.
        """
        if tokens == 0:  # all documents were empty, which tells nothing: the step is taken again
            return None
        name, counts = self._steps.pop(0)
        if counts:
            self._taken[name].append(seconds / tokens)
            self._tokens.append(tokens)
        if self._steps:
            return None
        mean = statistics.mean(self._tokens)
        for scheme in self._left:
            self._seconds[scheme] = mean * slowest(statistics.median(self._taken[scheme]))
        fastest = min(self._seconds.values())
        self._turns -= 1
        self._begin_turn([scheme for scheme in self._left if self._seconds[scheme] <= _HOPELESS * fastest])
        return self._seconds if self._turns == 0 or len(self._left) == 1 else None

    def _begin_turn(self, schemes: Sequence[str]) -> None:
        self._left = list(schemes)
        self._steps = [(name, place > 0) for name in schemes for place in range(_BLOCK)]


def forecast(model: PreTrainedModel, workload: Workload, *, overlap: bool, ranks: int) -> dict[str, float]:
    """Seconds of a step under each safe scheme, without those of the update; all ranks call this, between steps.

    `overlap` tells whether gradients travel during backward. Gradients are lost.
    """
    work = workload.measure(overlap=overlap)
    link = measure_link(model.device, workload.run if overlap else None)
    safe = {name: SCHEMES[name] for name in SAFE}
    rehearsed = measure_coding(list(model.named_parameters()), safe, ranks)
    return {name: predict(work, link, exchange).seconds for name, exchange in rehearsed.items()}
