"""Run by every rank: training on a disk where rank 0 finds no room, at the start and later."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from hvd_novel import comm
from hvd_novel.errors import UserError
from hvd_novel.monitor.records import MetricsFile
from hvd_novel.train import run

topology = comm.init(deterministic=False)
config = run.load_config(Path(sys.argv[1]), [])
folder = Path(config.run.dir)


def allow(nbytes: int) -> None:
    """Let rank 0 write no file beyond this size; the error is of the same kind as that of a full disk."""
    if topology.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def mistake(name: str) -> str:
    """What training fails with, the same on all ranks."""
    fault = ""
    try:
        run.train(config, Console())
    except UserError as error:
        fault = str(error)
    faults = comm.all_gather_object(fault, name)
    assert faults == [fault] * topology.size, faults
    allow(resource.RLIM_INFINITY)
    return fault


allow(1050)  # enough for the lengths, too little for config.yaml
assert f"cannot write to run.dir={folder}: File too large" in (found := mistake("start")), found

emit = MetricsFile.emit


def emit_less(self: MetricsFile, record: Any) -> None:
    """Beyond the first records there is no room."""
    if record["step"] == 3:
        allow((folder / "metrics.jsonl").stat().st_size + 9)
    emit(self, record)


MetricsFile.emit = emit_less
assert f"cannot write to run.dir={folder}: File too large" in (found := mistake("later")), found
if topology.rank == 0:
    print("two full disks survived")
comm.leave(0)
