"""Training where rank 0 cannot write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.launch import run


def test_all_ranks_stop_with_one_message(write_config: Callable[..., Path], tmp_path: Path) -> None:
    worker = Path(__file__).with_name("full_disk_worker.py")
    command = ["python", str(worker), str(write_config(checkpoint={"every": 2}))]
    finished = run(command, launcher="horovodrun --gloo", ranks=2)
    assert finished.code == 0, finished.output
    assert "two full disks survived" in finished.output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000002\n"
