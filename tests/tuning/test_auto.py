"""The choice of a compressor in a run: when it is made, from what, and that it outlives an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_novel.checkpoint import manifest
from hvd_novel.train import auto
from hvd_novel.train.auto import Auto
from tests.distributed.test_resume import records
from tests.distributed.test_training import losses
from tests.launch import hvd_novel


class Optimizer:
    """Remembers the compressors that it was given."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def set_compression(self, compression: Any) -> None:
        self.used.append(type(compression).__name__)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "slowest", lambda seconds: seconds)


def chooser(*forecasts: dict[str, float], ranks: int = 2, recheck_every: int = 0) -> tuple[Auto, Optimizer]:
    optimizer, coming = Optimizer(), iter(forecasts)
    return Auto(optimizer, lambda: next(coming), ranks=ranks, recheck_every=recheck_every), optimizer


def take(chooser: Auto, steps: range, seconds: dict[str, float]) -> list[tuple[int, str, str]]:
    """Take `steps` that last `seconds` under each scheme; returns (step, name, how) of what was decided."""
    decisions = []
    for step in steps:
        decisions.append((step, chooser.before_step(step)))
        tokens = 100 + step % 3
        decisions.append((step + 1, chooser.after_step(seconds[chooser.name] * tokens / 100, tokens)))
    return [(step, decision["name"], decision["how"]) for step, decision in decisions if decision]


CLEAR = {"none": 10.0, "fp16": 5.0, "int8": 2.5}
CLOSE = {"none": 1.0, "fp16": 1.1, "int8": 1.3}


def test_steps_without_tokens_can_be_tried() -> None:
    choice, _ = chooser(CLOSE)
    found = None
    for step in range(50):
        choice.before_step(step)
        found = found or choice.after_step(CLOSE[choice.name], 0 if step == 1 else 100)
    assert found is not None
    assert found["name"] == "none"


def test_a_clear_prediction_decides() -> None:
    choice, optimizer = chooser(CLEAR)
    assert take(choice, range(50), CLEAR) == [(0, "int8", "predicted")]
    assert optimizer.used == ["QSGD"]


def test_where_it_is_close_steps_decide() -> None:
    choice, _ = chooser(CLOSE)
    # int8 is predicted to be slow and not tried; of the others, the one that turns out to be fast is taken.
    decided = take(choice, range(60), {"none": 1.0, "fp16": 0.95, "int8": 0.1})
    assert decided == [(0, "none", "predicted, trying none, fp16"), (24, "fp16", "tried")]


def test_what_turns_out_to_be_slow_is_not_tried_again() -> None:
    choice, optimizer = chooser({"none": 1.0, "fp16": 1.0, "int8": 1.0})
    decided = take(choice, range(60), {"none": 1.0, "fp16": 0.95, "int8": 1.5})
    assert decided[-1] == (9 + 3 * 6, "fp16", "tried")
    assert optimizer.used.count("QSGD") == 1
    choice, _ = chooser(CLOSE)
    assert take(choice, range(60), {"none": 1.0, "fp16": 0.8})[-1] == (6, "fp16", "tried")


def test_within_a_percent_the_exact_one_is_kept() -> None:
    choice, _ = chooser(CLOSE)
    decided = take(choice, range(60), {"none": 1.0, "fp16": 0.995, "int8": 0.1})
    assert decided[-1][1:] == ("none", "tried")


def test_it_is_reconsidered_at_declared_steps_only() -> None:
    choice, optimizer = chooser(CLEAR, {"none": 1.0, "fp16": 5.0, "int8": 5.0}, CLEAR, recheck_every=20)
    decided = take(choice, range(45), CLEAR)
    assert decided == [(0, "int8", "predicted"), (20, "none", "predicted"), (40, "int8", "predicted")]
    assert optimizer.used == ["QSGD", "NoCompression", "QSGD"]


def test_one_rank_measures_nothing() -> None:
    choice, optimizer = chooser(ranks=1)  # a forecast would fail
    assert take(choice, range(5), {"none": 1.0}) == [(0, "none", "nothing is sent")]
    assert optimizer.used == []


def test_what_was_settled_is_restored_and_a_trial_begins_anew() -> None:
    choice, _ = chooser(CLEAR)
    take(choice, range(10), CLEAR)
    again, optimizer = chooser(CLOSE, recheck_every=20)
    again.load_state_dict(choice.state_dict())
    assert take(again, range(10, 20), CLEAR) == []
    assert optimizer.used == ["QSGD"]
    assert take(again, range(20, 21), CLEAR) == [(20, "int8", "predicted, trying none, fp16")]
    third, _ = chooser(CLOSE)
    third.load_state_dict(again.state_dict())
    assert take(third, range(21, 22), CLOSE)[0][2].startswith("predicted, trying")
    elsewhere, _ = chooser({"none": 1.0, "fp16": 5.0, "int8": 5.0}, ranks=3)
    elsewhere.load_state_dict(choice.state_dict())
    assert take(elsewhere, range(10, 12), CLEAR) == [(10, "none", "predicted")], "on other ranks, other times"


@pytest.mark.timeout(600)
def test_two_ranks_choose_and_a_resumed_run_keeps_the_choice(write_config: Callable[..., Path], tmp_path: Path) -> None:
    sections = {
        "compression": {"name": "auto", "recheck_every": 0},
        "sharding": {"refit_every": 0},
        "batch": {"tokens": 300, "micro_batch_tokens": 300},
        "schedule": {"steps": 44},
        "checkpoint": {"every": 40},
        "log": {"every": 50},
    }
    config = write_config("first", **sections)
    done = hvd_novel("train", config, launcher="mpirun", ranks=2)
    assert done.code == 0, done.output
    decided = records(tmp_path / "first", "compression")
    assert decided[0]["step"] == 0
    assert set(decided[0]) > {"name", "how", "none", "fp16", "int8"}
    assert "compression=auto at step 0: none (predicted" in done.output or len(decided) == 1

    # A copy in whose checkpoint int8 is in force, whatever was the fastest here, resumed twice.
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    forget_after(tmp_path / "whole", 40, scheme="int8")
    resume(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    forget_after(tmp_path / "again", 42)
    resume(config, tmp_path / "again")
    for name in ("whole", "again"):
        assert records(tmp_path / name, "compression") == decided, "nothing was decided anew"
        assert all(record["compression_ratio"] > 3 for record in records(tmp_path / name, "train")[40:])
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 44


def resume(config: Path, folder: Path) -> None:
    done = hvd_novel("train", config, f"run.dir={folder}", "checkpoint.every=2", launcher="mpirun", ranks=2)
    assert done.code == 0, done.output
    assert "resuming at step" in done.output


def forget_after(folder: Path, step: int, scheme: str = "") -> None:
    """Remove the checkpoints after `step`, and put `scheme` into force in the one that is left."""
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    if scheme:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        facts = json.loads((checkpoint / manifest.NAME).read_text())
        trainer = json.loads((checkpoint / "trainer.json").read_text())
        trainer["auto"] = {"name": scheme, "settled": True, "ranks": 2}
        (checkpoint / "trainer.json").write_text(json.dumps(trainer))
        (checkpoint / manifest.NAME).unlink()
        manifest.write(checkpoint, {key: facts[key] for key in ("step", "world_size", "store_fingerprint")})
