"""``hvd-novel plan``: figures that must hold, as a table, as JSON and as a picture, in one process for any ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hvd_novel.cli import app
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model import build
from hvd_novel.sharding.cost import Cost, from_model
from hvd_novel.sharding.forecast import forecast, least_makespan, padded, padding
from hvd_novel.sharding.plan import Plan
from hvd_novel.train.plan_report import plan_report
from hvd_novel.train.run import load_config
from tests.launch import hvd_novel

WriteConfig = Callable[..., Path]


def report_of(path: Path, *, ranks: int, steps: int = 20) -> dict[str, Any]:
    return plan_report(load_config(path, []), ranks=ranks, steps=steps)


def test_the_command_prints_tables_and_draws(write_config: WriteConfig, tmp_path: Path) -> None:
    """A real process: nothing of a launcher is needed, and the run's folder is left alone."""
    picture = tmp_path / "plan.png"
    done = hvd_novel("plan", write_config(), "batch.tokens=900", "--ranks", 3, "--plot", picture)
    assert done.code == 0, done.output
    for part in ("20 steps on 3 ranks", "padding avoided", "lengths of samples", "greedy"):
        assert part in done.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not (tmp_path / "run").exists()


def test_the_json_object_is_the_report(write_config: WriteConfig, store: Path) -> None:
    path = write_config(schedule={"steps": 7, "warmup_steps": 0})
    result = CliRunner().invoke(app, ["plan", str(path), "--ranks", "4", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(json.dumps(report_of(path, ranks=4)))
    split = TokenStore.open(store).split("train")
    assert (report["ranks"], report["steps"]) == (4, 7), "not more steps than the run has"
    assert (report["documents"], report["tokens"]) == (len(split), int(split.lengths.sum()))
    histogram = report["lengths"]["histogram"]
    assert sum(histogram["counts"]) == len(split)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert set(report["strategies"]) == {"cost", "token", "random", "greedy"}
    for name, row in report["strategies"].items():
        busy = report["per_step"]["utilisation"][name]
        assert len(busy) == 7
        assert row["utilisation"]["mean"] == pytest.approx(np.mean(busy))
        assert row["utilisation"]["min"] == min(busy)
        assert row["slowest"]["max"] == pytest.approx(1 / min(busy))
        assert row["packs"]["min"] <= row["packs"]["mean"] <= row["packs"]["max"]
    bounds = report["per_step"]["bound"]
    assert report["bound"]["binding_steps"] == sum(bound > 1 for bound in bounds)
    limits = report["per_step"]["limit"]
    assert all(limit <= min(1.0, 1 / bound) + 1e-9 for limit, bound in zip(limits, bounds, strict=True))
    for name in ("cost", "token", "random"):  # greedy takes other documents together
        for limit, busy in zip(limits, report["per_step"]["utilisation"][name], strict=True):
            assert busy <= limit + 1e-9, name


def test_one_rank_is_always_busy_and_more_ranks_than_samples_are_not(write_config: WriteConfig) -> None:
    alone = report_of(write_config(), ranks=1)
    assert all(row["utilisation"]["min"] == 1.0 for row in alone["strategies"].values())
    crowd = report_of(write_config(), ranks=500)
    assert crowd["documents"] < 500
    assert crowd["bound"]["binding_steps"] == crowd["steps"]
    for row in crowd["strategies"].values():
        assert row["packs"]["min"] == 0
        assert row["utilisation"]["mean"] < 0.1


def test_a_curriculum_changes_what_is_foreseen(write_config: WriteConfig) -> None:
    plain = report_of(write_config(), ranks=2)
    curriculum = {"enabled": True, "thresholds": [100, 200], "max_lengths": [64, 64, 64]}
    shorter = report_of(write_config(curriculum=curriculum), ranks=2)
    assert shorter["bound"]["max"] < plain["bound"]["max"]
    assert shorter["padding"]["batch"] > plain["padding"]["batch"]


def test_the_cost_is_that_of_the_real_model(write_config: WriteConfig, store: Path, tmp_path: Path) -> None:
    """Without weights: of a new model, and of a pretrained one whose vocabulary the store enlarges."""
    config = load_config(write_config(), [])
    tokenizer = TokenStore.open(store).load_tokenizer()
    real = build.build(
        config.model, tokenizer, compute=config.compute, device=torch.device("cpu"), attention="sdpa", max_len=256
    )
    assert report_of(write_config(), ranks=2)["cost"] == from_model(real, 256)._asdict()
    real.save_pretrained(tmp_path / "model")
    pretrained = write_config(model={"pretrained": str(tmp_path / "model")})
    assert report_of(pretrained, ranks=2)["cost"] == from_model(real, 256)._asdict()


def test_mistakes(write_config: WriteConfig, tmp_path: Path) -> None:
    wrong = CliRunner().invoke(app, ["plan", str(write_config()), "batch.token=5"])
    assert isinstance(wrong.exception, UserError)
    assert "batch.token: unknown key" in str(wrong.exception)
    with pytest.raises(UserError, match="does not exist"):
        report_of(write_config(data={"store": str(tmp_path / "none")}), ranks=2)
    with pytest.raises(UserError, match="does not hold a model"):
        report_of(write_config(model={"pretrained": str(tmp_path)}), ranks=2)
    with pytest.raises(UserError, match="found by trial"):
        report_of(write_config(batch={"micro_batch_tokens": "auto"}), ranks=2)
    result = CliRunner().invoke(app, ["plan", str(write_config()), "--plot", str(tmp_path / "no" / "p.png")])
    assert isinstance(result.exception, UserError)
    assert "choose another file for --plot" in str(result.exception)


def test_padding_is_counted_batch_by_batch() -> None:
    lengths = np.array([3, 5, 1, 1, 7], np.int32)
    assert padded(lengths, 2).tolist() == [10, 2, 7]
    assert padded(lengths, 9).tolist() == [35]
    plan = Plan(np.full(20, 50, np.int32), np.ones(20, np.int32), seed=0, step_tokens=300)
    found = padding(plan, [100, 100], range(plan.steps_per_epoch))
    assert (found.batch, found.share, found.largest) == (2, 0.0, 100)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_deal_is_better_than_the_least_makespan(costs: list[int], replicas: int) -> None:
    deals = itertools.product(range(replicas), repeat=len(costs))
    best = min(max(np.bincount(deal, costs, replicas)) for deal in deals)
    assert least_makespan(np.sort(np.array(costs, np.float64))[::-1], replicas) <= best + 1e-9


def test_the_least_makespan_of_equal_items_is_exact() -> None:
    assert least_makespan(np.full(41, 6.0), 8) == 36.0, "one of eight gets six of 41"
    assert least_makespan(np.array([9.0, 1.0]), 3) == 9.0


def test_a_forecast_is_what_the_plan_says() -> None:
    lengths = np.random.default_rng(1).integers(0, 900, 300).astype(np.int32)
    cost = Cost(100.0, 1.0, 7.0)
    plan = Plan(lengths, np.ones(300, np.int32), seed=0, step_tokens=8000, cost=cost)
    found = forecast(plan, [400] * 3, range(5))
    for step in range(5):
        planned = plan.step(step, [400] * 3)
        sizes = [[s.stop - s.start for spans in packs for s in spans] for packs in planned.packs]
        loads = [cost.of(np.array(size)).sum() for size in sizes]
        assert found.loads[step] == pytest.approx(loads)
        assert found.packs[step].tolist() == [len(packs) for packs in planned.packs]
        assert found.tokens[step] == sum(map(sum, sizes))
        longest = max(max(size) for size in sizes)
        assert found.bound[step] == pytest.approx(cost.of(np.array(longest)) / np.mean(loads))
