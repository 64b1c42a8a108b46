"""Real novels, as users have them, through prepare and thirty steps on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.test_training import losses
from tests.launch import hvd_novel


@pytest.mark.timeout(600)
def test_three_novels_to_thirty_steps(real_novels: Path, write_config: Callable[..., Path], tmp_path: Path) -> None:
    store = tmp_path / "novels"
    done = hvd_novel("prepare", real_novels, "--out", store, "--vocab-size", 4000, "--max-len", 2048, "--json")
    assert done.code == 0, done.output
    report = json.loads((store / "report.json").read_text("utf-8"))
    assert sorted(file["chapters"] for file in report["files"]) == [100, 120, 120]
    assert {file["status"] for file in report["files"]} == {"ok"}
    config = write_config(
        data={"store": str(store)},
        batch={"tokens": 8192, "micro_batch_tokens": 4096},
        schedule={"steps": 30, "warmup_steps": 5},
        optimizer={"lr": 1e-2},
    )
    done = hvd_novel("train", config, launcher="horovodrun --gloo", ranks=2)
    assert done.code == 0, done.output
    values = losses(tmp_path / "run")
    assert len(values) == 30
    assert values[0] > 8.0, "a new model knows nothing: ln 4000 = 8.3"
    assert sum(values[-5:]) / 5 < 7.3, "and has learned the frequencies by now"
