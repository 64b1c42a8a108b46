"""Starts real ranks that run many checks in one go, because starting them is what takes long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.launch import run

LAUNCHERS = {"mpi": "mpirun", "gloo": "horovodrun --gloo"}
_SCRIPT = Path(__file__).with_name("run_checks.py")
_ENVIRONMENT = {
    "HOROVOD_CYCLE_TIME": "0.5",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
    "HOROVOD_LOG_LEVEL": "error",
}
# With fusion, sums of three and more ranks depend on which tensors happen to travel together.
_UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}


def run_checks(launcher: str, ranks: int, folder: Path, *, timeout: float) -> dict[str, list[str | None]]:
    """Run the checks for `launcher` on `ranks` ranks; for each, what went wrong on each rank.

    Checks that were not reached on all ranks (a hang, a crash) have fewer entries than ranks.
    """
    command = [sys.executable, str(_SCRIPT), launcher, str(folder)]
    environment = _ENVIRONMENT | (_UNFUSED if ranks > 2 else {})
    try:
        done = run(command, launcher=LAUNCHERS[launcher], ranks=ranks, timeout=timeout, **environment)
        fault = None if done.code == 0 else done.output[-5000:]
    except AssertionError as timed_out:
        fault = str(timed_out)[-5000:]
    results: dict[str, list[str | None]] = {"launch": [fault]}
    for rank in range(ranks):
        file = folder / f"rank-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            name, error, _ = json.loads(line)
            results.setdefault(name, []).append(error)
    return results
