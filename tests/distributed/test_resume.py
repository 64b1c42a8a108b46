"""Killed and started again: bit for bit the run that was never interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_training import losses
from tests.launch import HVD_NOVEL, finish, hvd_novel, kill, start

SECTIONS = {
    "run": {"deterministic": True},
    "model": {"attention_dropout": 0.2},
    "schedule": {"steps": 14, "warmup_steps": 4},
    "checkpoint": {"every": 4},
}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and len(losses(folder)) >= step:
            return
        assert process.poll() is None, f"the run ended early:\n{process.communicate()[0]}"
        time.sleep(0.02)
    kill(process)
    raise AssertionError(f"step {step} was not reached in {timeout} s")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def weights(folder: Path, step: int = 14) -> bytes:
    return (folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("launcher", "ranks", "sections"),
    [
        ("plain", 1, {"compute": {"precision": "fp16"}}),
        (
            "mpirun",
            2,
            {
                "compression": {"name": "topk", "density": 0.05},
                "curriculum": {"enabled": True, "thresholds": [100, 200], "max_lengths": [90, 150, None]},
            },
        ),
        (
            "horovodrun --gloo",
            2,
            {
                "compute": {"precision": "bf16"},
                "compression": {"name": "onebit", "warm_up": "int8"},
                "optimizer": {"name": "onebit-adam", "freeze_step": 5},
            },
        ),
    ],
    ids=["fp16", "topk", "onebit-adam"],
)
def test_killed_and_resumed_equals_uninterrupted(
    write_config: Callable[..., Path], tmp_path: Path, launcher: str, ranks: int, sections: dict[str, dict[str, Any]]
) -> None:
    sections = SECTIONS | sections
    whole = hvd_novel("train", write_config("whole", **sections), launcher=launcher, ranks=ranks)
    assert whole.code == 0, whole.output

    config = write_config("killed", **sections)
    process = start([HVD_NOVEL, "train", str(config)], launcher=launcher, ranks=ranks)
    wait_for_step(tmp_path / "killed", 6, process)
    kill(process)
    process.communicate()
    assert len(losses(tmp_path / "killed")) < 14, "the run was finished before it could be killed"

    resumed = hvd_novel("train", config, launcher=launcher, ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert "resuming at step" in resumed.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    if ranks > 1:
        assert records(tmp_path / "killed", "train")[-1]["compression_ratio"] > 3, (
            "the compressed stage was meant to be reached"
        )


@pytest.mark.timeout(600)
def test_dropout_is_on(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """The bitwise test above would pass without dropout: show that it is on."""
    hvd_novel("train", write_config("on", **SECTIONS | {"schedule": {"steps": 5}}))
    off = SECTIONS | {"schedule": {"steps": 5}, "model": {"attention_dropout": 0.0}}
    hvd_novel("train", write_config("off", **off))
    assert losses(tmp_path / "on") != losses(tmp_path / "off")


@pytest.mark.timeout(600)
def test_a_signal_saves_and_asks_to_be_started_again(write_config: Callable[..., Path], tmp_path: Path) -> None:
    config = write_config("signalled", **SECTIONS | {"schedule": {"steps": 4000}, "checkpoint": {"every": 0}})
    process = start([HVD_NOVEL, "train", str(config)])
    wait_for_step(tmp_path / "signalled", 2, process)
    process.send_signal(signal.SIGTERM)
    finished = finish(process)
    assert finished.code == 75, finished.output
    status = json.loads((tmp_path / "signalled" / "status.json").read_text())
    assert status["state"] == "preempted"
    assert (tmp_path / "signalled" / "checkpoints" / f"step-{status['step']:08d}" / "MANIFEST.json").exists()


@pytest.mark.timeout(600)
def test_resuming_on_another_number_of_ranks_trains_the_same_documents(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    # Samples are longer than packs, and an epoch ends at step 10: its account closes over the interruption.
    batch = {"tokens": 6000, "micro_batch_tokens": 200}
    sections = SECTIONS | {"model": {"attention_dropout": 0.0}, "batch": batch}
    hvd_novel("train", write_config("whole", **sections))
    config = write_config("moved", **sections)
    process = start([HVD_NOVEL, "train", str(config)])
    wait_for_step(tmp_path / "moved", 6, process)
    kill(process)
    process.communicate()
    moved = hvd_novel("train", config, launcher="mpirun", ranks=2)
    assert moved.code == 0, moved.output
    assert "written by 1 ranks and there are 2 now" in moved.output
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    accounts = [records(tmp_path / name, "ledger") for name in ("whole", "moved")]
    assert accounts[0] == accounts[1]
    assert [account["unexplained"] for account in accounts[0]] == [0]
