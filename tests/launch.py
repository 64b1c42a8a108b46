"""Starting real processes, each under a time limit: a hang is a failure with what was printed so far."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LAUNCHERS = {
    "plain": [],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "{ranks}"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "{ranks}", "-H", "localhost:{ranks}"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "-np", "{ranks}", "-H", "localhost:{ranks}"],
}
HVD_NOVEL = str(Path(sys.executable).with_name("hvd-novel"))


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    output: str
    """stdout and stderr, interleaved."""


def start(command: Sequence[str], *, launcher: str = "plain", ranks: int = 1, **env: str) -> subprocess.Popen[str]:
    """Start `command` under `launcher`, in a process group of its own."""
    prefix = [part.format(ranks=ranks) for part in LAUNCHERS[launcher]]
    return subprocess.Popen(
        [*prefix, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",  # mpirun cuts what it forwards at any byte
        env=environment() | env,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> Finished:
    """Wait for `process`; when the time is over, kill its group and fail with its output."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{process.args} did not end within {timeout} s; it printed:\n{output}") from None
    return Finished(process.returncode, output)


def run(
    command: Sequence[str], *, launcher: str = "plain", ranks: int = 1, timeout: float = 240, **env: str
) -> Finished:
    """Run `command` to its end."""
    return finish(start(command, launcher=launcher, ranks=ranks, **env), timeout)


def hvd_novel(*arguments: str | Path, launcher: str = "plain", ranks: int = 1, **env: str) -> Finished:
    """Run the project's command."""
    return run([HVD_NOVEL, *map(str, arguments)], launcher=launcher, ranks=ranks, **env)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL `process` and all that it started; ranks live in process groups of their own."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def environment() -> dict[str, str]:
    """The environment of started processes: this interpreter's tools first, and short waits for lost ranks."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
