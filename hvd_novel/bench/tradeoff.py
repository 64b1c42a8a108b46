"""What compression costs and gains: loss at equal steps, at equal bytes, and at equal time on a slow link.

Of time there is a model, as a machine that trains for the benchmark has no slow link: a step takes as long as a dense
step took there, and then its bytes go over the wire. Nothing overlaps, and coding is free: both speak for those that
send less, the more so the faster the link. Steps and bytes give the same ranking on any machine; time depends on the
link and on how long a step computes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hvd_novel.bench.convergence import DENSE, Run, groups, tuned
from hvd_novel.figures import save

HALF = "fp16"
"""Half the bytes for a rounding: what is left to gain for others is told against it."""
TOLERANCE = 0.02
"""The loss that is to be reached lies so much above what dense training comes to, relative."""
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Link:
    """A wire, and what is computed between its uses."""

    bytes_per_second: float
    """That one rank sends."""
    step_seconds: float
    """Of a step without any exchange."""

    def seconds(self, step: float, bytes_sent: float, ranks: int) -> float:
        """When `step` steps are done, in which all `ranks` together sent `bytes_sent`."""
        return step * self.step_seconds + bytes_sent / ranks / self.bytes_per_second


def step_seconds(runs: Sequence[Run]) -> float:
    """Of a dense step where the runs were made: the fastest tenth ends here, so that other load counts little."""
    return float(np.quantile([second for run in runs if run.scheme == DENSE for second in run.seconds], 0.1))


def compare(runs: Sequence[Run], link: Link) -> dict[str, Any]:
    """Every scheme, with each rate that it was trained with, at equal bytes and at equal time.

    * ``bytes``: what all ranks of the scheme that sends least sent in its whole run, mean over seeds; and ``seconds``,
      what the scheme that takes least takes for its
    * ``target``: the loss `TOLERANCE` above that of dense training, mean over seeds
    * ``rows``, each of a scheme and a rate (`Run.shared`): ``loss_at_bytes`` and ``loss_at_seconds``, means over seeds;
      ``target_bytes`` of all ranks and ``target_seconds`` until the target is reached, medians over seeds;
      ``times_dense`` and ``times_fp16``, how many times longer these take to reach it, with the tuned rate

    Between evaluations loss is interpolated. None is what is not known, as some seed was not evaluated before, or did
    not reach the target, or fp16 was not run.
    """
    target = statistics.mean(run.loss for run in tuned(runs, DENSE)) * (1 + TOLERANCE)

    def at_end(axis: Callable[[Run], np.ndarray]) -> float:
        return min(statistics.mean(float(axis(run)[-1]) for run in group) for group in groups(runs).values())

    def of_time(run: Run) -> np.ndarray:
        return clock(run, link)

    def until_target(group: Sequence[Run]) -> float | None:
        return _of_all(statistics.median, [_reached(run, of_time(run), target) for run in group])

    def row(group: Sequence[Run]) -> dict[str, Any]:
        own = until_target(group)
        dense, half = (until_target(tuned(runs, scheme)) for scheme in (DENSE, HALF))
        return {
            **group[0].shared,
            "loss_at_bytes": _of_all(statistics.mean, [_loss_at(run, sent(run), budget) for run in group]),
            "loss_at_seconds": _of_all(statistics.mean, [_loss_at(run, of_time(run), seconds) for run in group]),
            "target_bytes": _of_all(statistics.median, [_reached(run, sent(run), target) for run in group]),
            "target_seconds": own,
            "times_dense": dense / own if dense and own else None,
            "times_fp16": half / own if half and own else None,
        }

    budget, seconds = at_end(sent), at_end(of_time)
    return {
        "bytes": budget,
        "seconds": seconds,
        "target": target,
        "link": {"bytes_per_second": link.bytes_per_second, "step_seconds": link.step_seconds},
        "rows": [row(group) for group in groups(runs).values()],
    }


def steps(run: Run) -> np.ndarray:
    """The step of each evaluation, float64."""
    return np.array([step for step, _, _ in run.curve], np.float64)


def losses(run: Run) -> np.ndarray:
    """The validation loss of each evaluation, float64."""
    return np.array([loss for _, loss, _ in run.curve], np.float64)


def sent(run: Run) -> np.ndarray:
    """Bytes that all ranks had sent at each evaluation, float64."""
    return np.array([count for _, _, count in run.curve], np.float64)


def clock(run: Run, link: Link) -> np.ndarray:
    """Seconds until each evaluation on `link`, float64."""
    return np.array([link.seconds(step, count, run.ranks) for step, _, count in run.curve])


def _loss_at(run: Run, axis: np.ndarray, place: float) -> float | None:
    return float(np.interp(place, axis, losses(run))) if place >= axis[0] else None


def _reached(run: Run, axis: np.ndarray, target: float) -> float | None:
    """Where on `axis` the loss first comes down to `target`."""
    below = np.flatnonzero(losses(run) <= target)
    if not len(below):
        return None
    last = int(below[0])
    if last == 0:
        return float(axis[0])
    pair = slice(last - 1, last + 1)
    return float(np.interp(-target, -losses(run)[pair], axis[pair]))


def _of_all(middle: Callable[[list[float]], float], found: Sequence[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return middle(known) if known and len(known) == len(found) else None


def table(found: dict[str, Any]) -> Table:
    """What `compare` gave, a line for each scheme and rate."""
    link = found["link"]
    printed = Table(
        title=f"{8 * link['bytes_per_second'] / 1e6:g} Mbit/s, {1000 * link['step_seconds']:.0f} ms to compute a step",
        caption=f"target: a loss of {found['target']:.4f}, {TOLERANCE:.0%} above dense training's",
    )
    columns = (
        "scheme",
        f"loss at {found['bytes'] / 1e6:,.0f} MB",
        f"loss at {found['seconds']:,.0f} s",
        "MB to target",
        "s to target",
        "times dense",
        "times fp16",
    )
    for column in columns:
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in found["rows"]:
        printed.add_row(
            row["label"],
            _shown(row["loss_at_bytes"], ".4f"),
            _shown(row["loss_at_seconds"], ".4f"),
            _shown(row["target_bytes"] and row["target_bytes"] / 1e6, ",.0f"),
            _shown(row["target_seconds"], ",.0f"),
            _shown(row["times_dense"], ".1f"),
            _shown(row["times_fp16"], ".1f"),
        )
    return printed


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plot(runs: Sequence[Run], link: Link, path: Path) -> None:
    """Loss over steps, bytes and time as a PNG, a line for each run. Raises UserError if it cannot be written.

    Schemes differ in colour, rates in how lines are broken.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    rate = f"seconds at {8 * link.bytes_per_second / 1e6:g} Mbit/s"
    places: list[tuple[str, Callable[[Run], np.ndarray]]] = [
        ("steps", steps),
        ("MB sent by all ranks", lambda run: sent(run) / 1e6),
        (rate, lambda run: clock(run, link)),
    ]
    schemes = list(dict.fromkeys(run.scheme for run in runs))
    factors = list(dict.fromkeys(run.lr_factor for run in runs))
    for axis, (label, place) in zip(axes, places, strict=True):
        for run in runs:
            colour = f"C{schemes.index(run.scheme)}"
            line = _LINES[factors.index(run.lr_factor) % len(_LINES)]
            title = run.label if run.seed == 1 else None
            axis.plot(place(run), losses(run), line, color=colour, label=title, marker=".", linewidth=1)
        axis.set(xlabel=label)
    axes[0].set(ylabel="validation loss, nats per token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, path)
