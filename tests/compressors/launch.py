"""Starts real ranks that run many checks in one go, because starting them is what takes long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

LAUNCHERS = ("mpi", "gloo")
_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent


def run_checks(launcher: str, ranks: int, folder: Path, *, timeout: float) -> dict[str, list[str | None]]:
    """Run the checks for `launcher` on `ranks` ranks; for each, what went wrong on each rank.

    Checks that were not reached on all ranks (a hang, a crash) have fewer entries than ranks.
    """
    log = folder / "log.txt"
    script = [sys.executable, str(_HERE / "run_checks.py"), launcher, str(folder)]
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(launcher, ranks) + script,
            env=_environment(launcher, ranks),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _stop(process)
    results: dict[str, list[str | None]] = {"launch": [None if process.returncode == 0 else log.read_text()[-5000:]]}
    for rank in range(ranks):
        file = folder / f"rank-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            name, error, _ = json.loads(line)
            results.setdefault(name, []).append(error)
    return results


def _command(launcher: str, ranks: int) -> list[str]:
    if launcher == "gloo":
        return ["horovodrun", "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    return ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", "-x", "PATH", "-x", "PYTHONPATH"]


def _environment(launcher: str, ranks: int) -> dict[str, str]:
    binaries = str(Path(sys.executable).parent)
    paths = os.pathsep.join(path for path in (str(_ROOT), os.environ.get("PYTHONPATH")) if path)
    environment = {
        **os.environ,
        "PATH": binaries + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HOROVOD_CYCLE_TIME": "0.5",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
        "HOROVOD_LOG_LEVEL": "error",
    }
    if ranks > 2:
        # With fusion, sums of three and more ranks depend on which tensors happen to travel together.
        environment["HOROVOD_FUSION_THRESHOLD"] = "0"
    return environment


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
