"""How evenly the sharding strategies load ranks, simulated on the plans that training would follow.

Lengths are those of `bench.lengths`, costs those of a model of hidden size 768: 12 * 768 * L + L². What the articles
claim is measured beside it: cost against random dealing, and stealing. Figures are exact and do not depend on the
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from hvd_novel.bench.lengths import Draw
from hvd_novel.bench.pulling import WAYS, busy
from hvd_novel.sharding.cost import Cost
from hvd_novel.sharding.forecast import Forecast, forecast, padding
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.strategies import STRATEGIES

COST = Cost(12.0 * 768, 1.0, 0.0)
FILL = 0.97
"""Tokens of a step / what its packs can hold: best-fit-decreasing then hardly ever needs one more."""
_SHUFFLED_STEPS = 2000
"""Steps whose variance is compared: of fewer it would be an accident (its standard error is 4 % of it)."""


class Ones:
    """One token of context for every document."""

    def __getitem__(self, documents: np.ndarray) -> np.ndarray:
        return np.ones(len(documents), np.int32)


def make_plan(lengths: np.ndarray, step_tokens: int, strategy: str = "cost") -> Plan:
    """The plan of a corpus with documents of `lengths`."""
    return Plan(lengths, Ones(), seed=0, step_tokens=step_tokens, strategy=strategy, cost=COST)


def balance(draw: Draw, *, ranks: int, cap: int, packs: int, steps: int) -> dict[str, Any]:
    """Figures of `steps` steps, all of an epoch, that hold about `packs` packs of `cap` tokens for each rank.

    * ``documents``, ``ranks``, ``cap``, ``packs``
    * ``bound`` (costliest span / mean cost of a rank: ``mean`` and ``max`` over steps, ``binding_steps`` above 1), and
      the utilisation that no deal can exceed: ``utilisation``, mean over steps
    * ``strategies``, by name: ``utilisation`` (mean / largest cost of ranks: mean over steps), ``p05`` and ``min`` of
      it, ``throughput`` (work / work possible, over all steps), ``against_random`` (ratio of throughputs),
      ``packs`` (most of a rank in a step)
    * ``reached``: utilisation of `cost` / that limit, the least over steps
    * ``shuffle_ratio``: see `shuffle_ratio`; `cost`, `token` and `random` take the same documents in the same steps
    * ``padding``: see `forecast.padding`
    """
    step_tokens = int(FILL * packs * ranks * cap)
    lengths = _enough(draw, steps * step_tokens)
    caps = [cap] * ranks
    plan = make_plan(lengths, step_tokens)
    epoch = range(plan.steps_per_epoch)
    found = {"cost": forecast(plan, caps, epoch)}
    for strategy in STRATEGIES[1:]:
        found[strategy] = forecast(make_plan(lengths, step_tokens, strategy), caps, epoch)
    even, random = found["cost"], found["random"]
    return {
        "ranks": ranks,
        "cap": cap,
        "packs": packs,
        "documents": len(lengths),
        "steps": len(epoch),
        "bound": {
            "mean": float(even.bound.mean()),
            "max": float(even.bound.max()),
            "binding_steps": int((even.bound > 1).sum()),
            "utilisation": float(even.limit.mean()),
        },
        "strategies": {strategy: _figures(figures, random) for strategy, figures in found.items()},
        "reached": float((even.utilisation / even.limit).min()),
        "shuffle_ratio": shuffle_ratio(plan, ranks),
        "padding": asdict(padding(plan, caps, epoch)),
    }


def _enough(draw: Draw, tokens: int) -> np.ndarray:
    """Lengths that add up to about `tokens`, rather one per cent more than less."""
    return draw(int(1.01 * tokens / draw(100_000).mean()) + 1)


def _figures(figures: Forecast, random: Forecast) -> dict[str, float]:
    return {
        "utilisation": float(figures.utilisation.mean()),
        "p05": float(np.percentile(figures.utilisation, 5)),
        "min": float(figures.utilisation.min()),
        "throughput": figures.throughput,
        "against_random": figures.throughput / random.throughput,
        "packs": int(figures.packs.max()),
    }


def shuffle_ratio(plan: Plan, ranks: int) -> float:
    """Variance between steps of the mean log-length of their documents / that of random orders cut in the same way.

    1 if steps are random samples of the corpus, larger if they are sorted by length in any way.
    """
    steps = plan.steps_per_epoch
    logs, generator = np.log(np.maximum(plan.lengths, 1)), np.random.default_rng(7)
    planned, shuffled = [], []
    for epoch in range(-(-_SHUFFLED_STEPS // steps)):
        planned += [logs[plan.documents(epoch * steps + step, ranks)].mean() for step in range(steps)]
        order = generator.permutation(len(logs))
        ends = plan.lengths[order].cumsum(dtype=np.int64)
        bounds = np.searchsorted(ends, np.arange(1, steps) * (ends[-1] / steps))
        shuffled += [part.mean() for part in np.split(logs[order], bounds) if len(part)]
    return float(np.var(planned) / np.var(shuffled))


def stealing(draw: Draw, *, ranks: int, cap: int, packs: int, steps: int) -> dict[str, dict[str, float]]:
    """How busy ranks are in each of `pulling.WAYS`, with equal speeds to 5 %, and with one rank 1.2 times as slow."""
    step_tokens = int(FILL * packs * ranks * cap)
    lengths = _enough(draw, steps * step_tokens)
    costs = {}
    for strategy in ("random", "cost"):
        plan = make_plan(lengths, step_tokens, strategy)
        costs[strategy] = [plan.step(step, [cap] * ranks).costs for step in range(plan.steps_per_epoch)]
    return {
        speeds: {way: busy(costs[strategy], way, slow=slow) for way, strategy in WAYS.items()}
        for speeds, slow in (("equal", 1.0), ("one_slow", 1.2))
    }


def measure(
    draws: dict[str, Draw], *, ranks: Sequence[int], caps: Sequence[int], packs: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """``balance`` and ``stealing``, a row for each source of lengths, number of ranks and cap."""
    settings = [(name, draw, size, cap) for name, draw in draws.items() for size in ranks for cap in caps]
    return {
        "balance": [
            {"lengths": name, **balance(draw, ranks=size, cap=cap, packs=packs, steps=steps)}
            for name, draw, size, cap in settings
        ],
        "stealing": [
            {"lengths": name, "ranks": size, "cap": cap} | stealing(draw, ranks=size, cap=cap, packs=packs, steps=steps)
            for name, draw, size, cap in settings
        ],
    }


def balance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `balance`."""
    table = Table(
        title="ranks busy, mean of steps (cost: lowest step in brackets)",
        caption="possible: more is not to be had from these samples. gain: throughput of cost / of random. "
        "shuffle: 1 if steps are random samples. padding: of padded batches.",
    )
    for column in ("lengths", "ranks", "cap", *STRATEGIES, "possible", "gain", "shuffle", "padding"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for row in rows:
        found = row["strategies"]
        table.add_row(
            row["lengths"],
            str(row["ranks"]),
            f"{row['cap']:,}",
            f"{found['cost']['utilisation']:.1%} ({found['cost']['min']:.1%})",
            *(f"{found[strategy]['utilisation']:.1%}" for strategy in STRATEGIES[1:]),
            f"{row['bound']['utilisation']:.1%}",
            f"{found['cost']['against_random'] - 1:+.0%}",
            f"{row['shuffle_ratio']:.2f}",
            f"{row['padding']['share']:.0%}",
        )
    return table


def stealing_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `stealing`."""
    table = Table(title="ranks busy, by how packs reach them (equal speeds to 5 % / one rank 1.2 times as slow)")
    for column in ("lengths", "ranks", "cap", *WAYS):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for row in rows:
        cells = (f"{row['equal'][way]:.1%} / {row['one_slow'][way]:.1%}" for way in WAYS)
        table.add_row(row["lengths"], str(row["ranks"]), f"{row['cap']:,}", *cells)
    return table
