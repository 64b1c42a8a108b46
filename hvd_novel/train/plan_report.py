"""``hvd-novel plan``: what a configuration will do on a number of ranks, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from hvd_novel.config import Config
from hvd_novel.errors import UserError
from hvd_novel.model import build
from hvd_novel.sharding.cost import from_model
from hvd_novel.sharding.forecast import Forecast, forecast, padding
from hvd_novel.sharding.strategies import STRATEGIES
from hvd_novel.train.run import make_plan, open_store

_BINS = 20


def plan_report(config: Config, *, ranks: int, steps: int) -> dict[str, Any]:
    """The first `steps` of the run (all, if it has fewer) planned for `ranks`, with each strategy.

    Runs in one process; the cost is the model's, from its dimensions alone. Raises UserError as training would.

    * ``ranks``, ``steps`` (planned here), ``steps_per_epoch``, ``documents``, ``tokens`` (of the training split),
      ``cap`` (most tokens in a pack)
    * ``cost``: ``linear``, ``quadratic`` and ``span``, in FLOP
    * ``lengths`` of documents: ``min``, ``median``, ``mean``, ``p95``, ``max``, and ``histogram``: ``edges`` [n + 1]
      and ``counts`` [n] of bins that end before their upper edges
    * ``step_tokens``: ``min``, ``mean``, ``max``
    * ``padding``: what batches of ``batch`` samples (as many as fill a pack on average) padded to the longest would be:
      ``share`` of padding in them, ``largest`` batch in tokens
    * ``packs_unfilled``: the part of the packs' caps that the configured strategy leaves empty (nothing is computed
      there)
    * ``bound``: costliest span / mean cost of a rank: ``mean`` and ``max`` over steps, ``binding_steps`` where it is
      above 1, so that no strategy can be even; ``utilisation``: mean over steps of what no strategy can exceed, by
      that and by the number of spans
    * ``strategies``, by name: ``utilisation`` (mean / largest cost of ranks in a step: ``mean``, ``p05``, ``min``),
      ``slowest`` (its inverse: ``mean``, ``p95``, ``max``), ``throughput`` (work / work possible, over all steps),
      ``packs`` of a rank in a step (``min``, ``mean``, ``max``)
    * ``per_step``: ``utilisation`` by strategy, ``bound`` and ``limit`` (of the utilisation), [steps] each
    """
    cap = config.batch.micro_batch_tokens
    if cap == "auto":
        raise UserError(
            "batch.micro_batch_tokens=auto is found by trial when training begins, and its log tells what was found; "
            "give a number, such as batch.micro_batch_tokens=8192"
        )
    store = open_store(config, verify=False)
    split = store.split("train")
    caps, steps = [cap] * ranks, min(steps, config.schedule.steps)
    model = build.skeleton(
        config.model, store.load_tokenizer(), max_len=store.header["max_len"], stretch=config.curriculum.enabled
    )
    cost = from_model(model, min(store.header["max_len"], cap))
    plan = make_plan(_with_strategy(config, "cost"), split, cost)
    found = {"cost": forecast(plan, caps, range(steps))}
    for strategy in STRATEGIES[1:]:
        found[strategy] = forecast(make_plan(_with_strategy(config, strategy), split, cost), caps, range(steps))
    configured, even = found[config.sharding.strategy], found["cost"]
    return {
        "ranks": ranks,
        "steps": steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "documents": len(split),
        "tokens": plan.tokens,
        "cap": cap,
        "cost": cost._asdict(),
        "lengths": _lengths(plan.lengths),
        "step_tokens": _summary(even.tokens),
        "padding": asdict(padding(plan, caps, range(steps))),
        "packs_unfilled": 1 - float(configured.tokens.sum()) / (cap * int(configured.packs.sum())),
        "bound": {
            "mean": float(even.bound.mean()),
            "max": float(even.bound.max()),
            "binding_steps": int((even.bound > 1).sum()),
            "utilisation": float(even.limit.mean()),
        },
        "strategies": {strategy: _balance(figures) for strategy, figures in found.items()},
        "per_step": {
            "utilisation": {strategy: figures.utilisation.tolist() for strategy, figures in found.items()},
            "bound": even.bound.tolist(),
            "limit": even.limit.tolist(),
        },
    }


def _with_strategy(config: Config, strategy: str) -> Config:
    return config.model_copy(update={"sharding": config.sharding.model_copy(update={"strategy": strategy})})


def _balance(figures: Forecast) -> dict[str, Any]:
    busy, slowest = figures.utilisation, 1 / figures.utilisation
    return {
        "utilisation": {
            "mean": float(busy.mean()),
            "p05": float(np.percentile(busy, 5)),
            "min": float(busy.min()),
        },
        "slowest": {
            "mean": float(slowest.mean()),
            "p95": float(np.percentile(slowest, 95)),
            "max": float(slowest.max()),
        },
        "throughput": figures.throughput,
        "packs": _summary(figures.packs),
    }


def _summary(values: np.ndarray) -> dict[str, float]:
    return {"min": values.min().item(), "mean": float(values.mean()), "max": values.max().item()}


def _lengths(lengths: np.ndarray) -> dict[str, Any]:
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, _BINS + 1).round().astype(np.int64))
    edges[0] = lengths.min()  # empty documents are counted too
    counts = np.diff(np.searchsorted(np.sort(lengths), edges))
    return {
        **_summary(lengths),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
