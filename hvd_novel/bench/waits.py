"""How long ranks wait for the slowest in each step, on real training steps.

Every step is taken with each way to deal its documents, one after the other, so that whatever else the machine does
meets all of them. Samples are cut to long-tailed lengths, whatever the store was made with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from hvd_novel import comm
from hvd_novel.bench.lengths import lognormal
from hvd_novel.bench.small_model import COMPUTE, small_model
from hvd_novel.corpus.store import StoreSplit, TokenStore
from hvd_novel.errors import UserError
from hvd_novel.sharding.cost import Cost, Measured, best_fit, from_model
from hvd_novel.sharding.packing import Pack, packs_of
from hvd_novel.sharding.plan import Plan
from hvd_novel.train.step import train_step

_CAP, _PACKS, _FILL = 2048, 4, 0.97
_WARM_UP = 12
"""Steps, dealt at random, whose times the cost is fitted to; only then the measurement begins."""


@dataclass(frozen=True)
class Way:
    """How the documents of a step are dealt."""

    strategy: str
    cost: Cost


def measure(path: Path, *, steps: int, width: int) -> dict[str, Any] | None:
    """Steps of a small model on the samples of the token store `path`; None on ranks other than 0.

    * ``ranks``, ``steps``, ``samples``; ``model_cost`` and ``fitted_cost``: the coefficients
    * ``ways``, by name: `random`, `token`, `cost` with the model's cost, and `fitted`, cost with one fitted to times.
      Of each: ``wait`` by the ``clock`` and by ``processor`` time: the part of the slowest rank's computation that a
      rank waits, mean over ranks and steps; ``against_random``: ratio of these; ``slowest``: what slowest ranks
      computed, all steps together, / the same under `random`

    Processor time is what a rank would take if the cores were its own. Raises UserError for what is no store, and
    on a single rank.
    """
    if not comm.launched() or comm.init(deterministic=False).size == 1:
        raise UserError("a rank alone waits for nobody; start this under mpirun or horovodrun, with two ranks or more")
    store = comm.together(lambda: TokenStore.open(path, verify=False), "bench.store")
    bench = _Bench(store, width)
    initial = from_model(bench.model, _CAP)
    bench.plan.cost = initial
    measured: list[Measured] = []
    for step in range(_WARM_UP):
        measured += bench.step(step, Way("random", initial)).packs
    everywhere = comm.all_gather_object(measured, "bench.measured")
    fitted = best_fit([pack for packs in everywhere for pack in packs], initial) or initial
    fitted = comm.all_gather_object(fitted, "bench.fitted")[0]
    ways = {
        "random": Way("random", initial),
        "token": Way("token", initial),
        "cost": Way("cost", initial),
        "fitted": Way("cost", fitted),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for step in range(_WARM_UP, _WARM_UP + steps):
        for name, way in ways.items():
            taken = bench.step(step, way)
            times[name].append((taken.clock, taken.processor))
    gathered = comm.all_gather_object(times, "bench.times")
    if comm.topology().rank != 0:
        return None
    return {
        "ranks": len(gathered),
        "steps": steps,
        "samples": len(bench.plan.lengths),
        "model_cost": initial._asdict(),
        "fitted_cost": fitted._asdict(),
        "ways": summary({name: np.array([rank[name] for rank in gathered]) for name in ways}),
    }


def summary(times: dict[str, np.ndarray]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of each way from seconds [ranks, steps, 2], by the clock and of processor time."""
    slowest = {name: seconds.max(axis=0) for name, seconds in times.items()}
    wait = {name: (1 - seconds.mean(axis=0) / slowest[name]).mean(axis=0) for name, seconds in times.items()}
    found: dict[str, dict[str, np.ndarray]] = {
        name: {
            "wait": wait[name],
            "against_random": wait[name] / wait["random"],
            "slowest": slowest[name].sum(axis=0) / slowest["random"].sum(axis=0),
        }
        for name in times
    }
    return {
        name: {key: dict(zip(("clock", "processor"), value.tolist(), strict=True)) for key, value in row.items()}
        for name, row in found.items()
    }


@dataclass(frozen=True)
class Taken:
    """What this rank computed in one step."""

    packs: list[Measured]
    clock: float
    processor: float


class _Bench:
    """A model, and the plan of its steps."""

    def __init__(self, store: TokenStore, width: int) -> None:
        self.model, self._optimizer = small_model(store, width)
        self._split = store.split("train")
        self._caps = [_CAP] * comm.topology().replicas
        self.plan = Plan(
            _long_tailed(self._split),
            self._split.column("context"),
            seed=0,
            step_tokens=int(_FILL * _PACKS * sum(self._caps)),
        )

    def step(self, step: int, way: Way) -> Taken:
        """Take `step`; gradients are sent after the last backward pass, so that computation is timed alone."""
        self.plan.strategy, self.plan.cost = way.strategy, way.cost
        planned = self.plan.step(step, self._caps)
        packs = list(packs_of(self._split, planned.packs[comm.topology().replica]))
        comm.all_reduce_sum([0.0], "bench.start")
        ends: list[float] = []
        result = train_step(
            self.model,
            self._optimizer,
            torch.amp.GradScaler("cpu", enabled=False),
            _clocked(packs, ends),
            trained_tokens=planned.trained_tokens,
            compute=COMPUTE,
            clip_norm=None,
            overlap=False,
        )
        measured = result.accumulated.packs
        return Taken(measured, sum(pack.seconds for pack in measured), ends[-1] - ends[0])


def _clocked(packs: Sequence[Pack], ends: list[float]) -> Iterator[Pack]:
    """`packs`; the processor time of this thread before them and after the last goes to `ends`."""
    ends.append(time.thread_time())
    yield from packs
    ends.append(time.thread_time())


def _long_tailed(split: StoreSplit) -> np.ndarray:
    """Most samples short and a few long, none longer than it is stored, int32 [samples]."""
    drawn = lognormal(len(split), median=250, sigma=1.0, shortest=16, longest=_CAP)
    return np.minimum(split.lengths, drawn)


def table(found: dict[str, Any]) -> Table:
    """What `measure` gave."""
    printed = Table(
        title=f"what a rank waits for the slowest of {found['ranks']}, in {found['steps']} steps",
        caption="by the clock / by processor time",
    )
    for column in ("dealt by", "wait", "against random", "slowest rank, against random"):
        printed.add_column(column, justify="left" if column == "dealt by" else "right")
    for name, row in found["ways"].items():
        wait, ratio, slowest = (row[key] for key in ("wait", "against_random", "slowest"))
        printed.add_row(
            name,
            f"{wait['clock']:.1%} / {wait['processor']:.1%}",
            *(f"{times['clock']:.2f} / {times['processor']:.2f}" for times in (ratio, slowest)),
        )
    return printed
