"""The sharding benchmark on small settings: its figures, and the orders between strategies that must hold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hvd_novel.bench import padding, planning, waits
from hvd_novel.bench.lengths import LN_A, LN_B, lengths_in, resampled, sources
from hvd_novel.bench.pulling import busy
from hvd_novel.bench.sharding import balance, make_plan, shuffle_ratio, stealing
from hvd_novel.cli import app
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model.loss import IGNORE
from tests.conftest import STORIES
from tests.launch import HVD_NOVEL, run


@pytest.mark.parametrize("ranks", [8, 64])
def test_cost_is_even_and_the_others_follow(ranks: int) -> None:
    """The oracle of balance: within 1 % of what is possible, at four packs a rank, in every step; shuffle-neutral."""
    found = balance(LN_B, ranks=ranks, cap=8192, packs=4, steps=30)
    assert 29 <= found["steps"] <= 31
    busy = {name: figures["utilisation"] for name, figures in found["strategies"].items()}
    assert busy["cost"] >= busy["token"] >= busy["greedy"] >= busy["random"]
    assert busy["cost"] > 0.99
    assert found["reached"] > 0.99, "in the worst step"
    assert found["strategies"]["cost"]["against_random"] > 1.3
    assert 0.8 < found["shuffle_ratio"] < 1.25
    assert found["bound"]["binding_steps"] == 0
    assert 0.3 < found["padding"]["share"] < 0.6


def test_few_spans_a_rank_are_balanced_as_well_as_they_can_be() -> None:
    """About six long spans a rank; and fewer spans than ranks, where nothing helps and the bound says so."""
    chapters = partial(resampled, np.random.default_rng(1).integers(2000, 12_000, 300))
    found = balance(chapters, ranks=8, cap=8192, packs=4, steps=30)
    assert found["strategies"]["cost"]["utilisation"] > 0.99
    starved = balance(partial(resampled, np.array([4000])), ranks=16, cap=8192, packs=1, steps=5)
    assert starved["bound"]["utilisation"] < 1
    assert starved["reached"] == pytest.approx(1.0)


def test_a_sorted_order_is_seen_by_the_shuffle_ratio() -> None:
    lengths = LN_B(4000)
    plan = make_plan(lengths, 250_000)
    assert 0.8 < shuffle_ratio(plan, 8) < 1.25
    documents = np.argsort(lengths).astype(np.int32)
    starts = [len(plan.documents(step, 8)) for step in range(plan.steps_per_epoch)]
    parts = np.split(documents, np.cumsum(starts)[:-1])
    plan.documents = lambda step, replicas: parts[step % len(parts)]  # type: ignore[method-assign]
    assert shuffle_ratio(plan, 8) > 10


def test_stealing_helps_where_dealing_is_bad_or_ranks_are_slow() -> None:
    found = stealing(LN_A, ranks=8, cap=8192, packs=4, steps=60)
    for speeds in ("equal", "one_slow"):
        ways = found[speeds]
        assert ways["dealt at random"] < ways["pulled at random"] < ways["longest first"]
        assert ways["dealt by cost"] < ways["longest first"]
    assert found["one_slow"]["dealt by cost"] < found["equal"]["dealt by cost"] - 0.05


def test_pulling_follows_the_list() -> None:
    """Costs 4, 3, 3 on two ranks of equal speed: 4 and 3 + 3 end at 4 and 6; dealt as here, at 7 and 3."""
    costs = [[[[3.0, 4.0], [3.0]]]] * 50
    flat = [step[0] for step in costs]
    assert busy(flat, "longest first", slow=1.0) == pytest.approx(5 / 6, abs=0.02)
    assert busy(flat, "dealt by cost", slow=1.0) == pytest.approx(5 / 7, abs=0.02)
    assert busy(flat, "dealt by cost", slow=3.0) == pytest.approx(12 / 21, abs=0.02)


def test_lengths_come_from_stores_and_novels(store: Path, tmp_path: Path) -> None:
    assert np.array_equal(lengths_in(store), TokenStore.open(store).split("train").lengths)
    chapters = lengths_in(STORIES)
    assert len(chapters) > 20
    drawn = sources(STORIES)[STORIES.name](500)
    assert set(drawn.tolist()) <= set(chapters.tolist())
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="holds no text"):
        lengths_in(tmp_path)


def test_planning_is_measured_in_full() -> None:
    found = planning.measure(documents=3000, many=9_000_000)
    for row, (ranks, cap) in zip(found["seconds"], planning.SETTINGS, strict=True):
        assert (row["documents"], row["ranks"], row["cap"]) == (3000, ranks, cap)
        assert row["steps"] == make_plan(LN_B(3000), int(0.97 * 4 * ranks * cap)).steps_per_epoch
    memory = found["memory"]
    assert memory["lengths_bytes"] == 36e6
    assert 36e6 <= memory["peak_bytes"] < 64e6, "beside the lengths, the order of the epoch and little else"


def test_padded_and_packed_steps_train_the_same() -> None:
    """Equal gradients from both ways, and padding that counts for nothing."""
    documents = [torch.randint(512, (length,)) for length in (40, 7, 23)]
    ids, labels = padding.collate_padded(documents)
    assert ids.shape == labels.shape == (3, 40)
    assert (labels != IGNORE).sum() == 40 + 7 + 23 - 3
    packing, padding_model = padding._models()
    before = [parameter.detach().clone() for parameter in packing.parameters()]
    padding._train_packed(packing, documents)
    padding._train_padded(padding_model, documents, 3)
    for start, one, other in zip(before, packing.parameters(), padding_model.parameters(), strict=True):
        assert (one - start).norm() > 0
        torch.testing.assert_close(one - start, other - start, rtol=1e-3, atol=1e-6)


def test_the_command_prints_all_of_it() -> None:
    arguments = ["bench", "sharding", "--ranks", "4", "--cap", "8192", "--steps", "5", "--documents", "0"]
    result = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["lengths"] for row in found["balance"]] == ["LN-A", "LN-B"]
    assert [row["lengths"] for row in found["stealing"]] == ["LN-A", "LN-B"]
    assert [row["lengths"] for row in found["padding"]] == ["even", "LN-A", "LN-B"]
    assert "planning" not in found
    arguments += ["--rounds", "0", "--corpus", str(STORIES)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert "ranks busy" in result.stdout
    assert STORIES.name in result.stdout


def test_waits_are_shares_of_the_slowest() -> None:
    """Two ranks, two steps: 2 and 4 seconds, then 3 and 3."""
    seconds = np.array([[2.0, 3.0], [4.0, 3.0]])
    found = waits.summary({"random": np.stack([seconds, 2 * seconds], axis=2), "cost": np.ones((2, 2, 2))})
    assert found["random"]["wait"] == {"clock": 0.125, "processor": 0.125}
    assert found["cost"]["wait"] == {"clock": 0.0, "processor": 0.0}
    assert found["cost"]["slowest"] == {"clock": pytest.approx(2 / 7), "processor": pytest.approx(1 / 7)}
    assert found["random"]["against_random"]["clock"] == 1.0


def test_one_rank_has_nobody_to_wait_for(store: Path) -> None:
    with pytest.raises(UserError, match="under mpirun or horovodrun"):
        waits.measure(store, steps=1, width=16)


def test_real_ranks_take_every_step_in_every_way(store: Path) -> None:
    command = [HVD_NOVEL, "bench", "waits", str(store), "--steps", "4", "--width", "16", "--json"]
    done = run(command, launcher="mpirun", ranks=2)
    assert done.code == 0, done.output
    found = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    assert (found["ranks"], found["steps"]) == (2, 4)
    assert set(found["ways"]) == {"random", "token", "cost", "fitted"}
    for row in found["ways"].values():
        assert all(0 <= row["wait"][clock] < 0.5 for clock in ("clock", "processor")), "one of two ranks never waits"
    assert all(value >= 0 for value in found["fitted_cost"].values())
    assert found["fitted_cost"] != found["model_cost"], "seconds, not FLOP"
