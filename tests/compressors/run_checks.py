"""What a launched rank runs: every check, in the same order on all ranks, with the outcome written as it goes."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import horovod.torch as hvd
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checks.common import compare_ranks

MODULES = {
    "mpi": (
        "exchange",
        "semantics",
        "models",
        "failures",
        "states",
        "accounts",
        "wrapping",
        "onebit_adam",
        "correction",
        "hierarchy",
        "warm_up",
    ),
    "gloo": ("exchange", "failures", "states", "hierarchy"),  # what depends on who carries the messages
}


def all_checks(launcher: str, ranks: int) -> list[str]:
    """Names of the checks to be run under `launcher` on `ranks` ranks, in order."""
    # Gloo's threads spin: four ranks on two cores take minutes for what others do in seconds.
    modules = ("exchange",) if (launcher, ranks) == ("gloo", 4) else MODULES[launcher]
    return [f"{name}.{check}" for name in modules for check in _checks(name)]


def _checks(name: str) -> list[str]:
    return [key for key in vars(importlib.import_module(f"checks.{name}")) if key.startswith("check_")]


def main(launcher: str, folder: Path) -> None:
    """Run all checks on this rank of the job."""
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    with (folder / f"rank-{hvd.rank()}.jsonl").open("w", buffering=1) as file:
        for name in all_checks(launcher, hvd.size()):
            module, check = name.split(".")
            error, begin = None, time.perf_counter()
            try:
                vars(importlib.import_module(f"checks.{module}"))[check]()
            except Exception:
                error = traceback.format_exc()
            error = compare_ranks() or error
            file.write(json.dumps([name, error, time.perf_counter() - begin]) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
