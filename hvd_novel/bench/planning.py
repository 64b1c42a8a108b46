"""What planning costs: seconds for an epoch of a million documents on one core, memory for ten million."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hvd_novel.bench.lengths import LN_B
from hvd_novel.bench.sharding import FILL, make_plan
from hvd_novel.errors import UserError

SETTINGS = ((8, 8192), (64, 8192), (64, 65536))
"""Ranks and caps for which an epoch is timed."""
_PACKS = 4
_MEASURE = "from hvd_novel.bench import planning; planning.print_memory({documents})"


def measure(*, documents: int, many: int) -> dict[str, Any]:
    """``seconds`` of an epoch of `documents`, in each of SETTINGS, and ``memory`` for `many` documents.

    A row of ``seconds``: ``documents``, ``ranks``, ``cap``, ``steps``; ``clock`` and ``processor`` seconds of what
    every rank does, from the shuffle to the spans of its own packs; ``all_listed``, processor seconds if it lists the
    spans of all ranks.
    """
    lengths = LN_B(documents)
    return {
        "seconds": [
            {"documents": documents, "ranks": ranks, "cap": cap, **_epoch(lengths, ranks, cap)}
            for ranks, cap in SETTINGS
        ],
        "memory": _memory(many),
    }


def _epoch(lengths: np.ndarray, ranks: int, cap: int) -> dict[str, float]:
    caps, step_tokens = [cap] * ranks, int(FILL * _PACKS * ranks * cap)
    make_plan(lengths[:1000], step_tokens).step(0, caps)  # compiles
    start, processor = time.perf_counter(), time.process_time()
    plan = make_plan(lengths, step_tokens)
    for step in range(plan.steps_per_epoch):
        plan.step(step, caps).packs[0]
    clock, lean = time.perf_counter() - start, time.process_time() - processor
    processor = time.process_time()
    plan = make_plan(lengths, step_tokens)
    for step in range(plan.steps_per_epoch):
        list(plan.step(step, caps).packs)
    return {
        "steps": plan.steps_per_epoch,
        "clock": clock,
        "processor": lean,
        "all_listed": time.process_time() - processor,
    }


def _memory(documents: int) -> dict[str, float]:
    """Runs in a process of its own, where nothing else has raised the peak."""
    command = [sys.executable, "-c", _MEASURE.format(documents=documents)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"measuring memory failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def print_memory(documents: int) -> None:
    """Plan some steps of `documents` and print what they took of memory, as a JSON object.

    ``lengths_bytes``: what a node holds of lengths; ``peak_bytes``: the most beside them, the epoch's order included,
    of which a node has one copy; ``cold_step_seconds``: the first step of an epoch, which shuffles.
    """
    ranks, cap = 8, 8192
    caps, step_tokens = [cap] * ranks, int(FILL * _PACKS * ranks * cap)
    make_plan(LN_B(1000), step_tokens).step(0, caps)  # compiles
    lengths = LN_B(documents)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    start = time.perf_counter()
    plan = make_plan(lengths, step_tokens)
    plan.step(0, caps)
    cold = time.perf_counter() - start
    for step in range(1, 100):
        plan.step(step, caps).packs[0]
    peak = _status("VmHWM") - before
    print(
        json.dumps(
            {
                "documents": documents,
                "lengths_bytes": lengths.nbytes,
                "peak_bytes": peak,
                "cold_step_seconds": cold,
            }
        )
    )


def _status(name: str) -> int:
    """A line of /proc/self/status in kB, as bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def table(found: dict[str, Any]) -> Table:
    """What `measure` gave."""
    memory = found["memory"]
    printed = Table(
        title=f"planning an epoch of {found['seconds'][0]['documents']:,} documents on one core",
        caption=f"{memory['documents']:,} documents: {memory['peak_bytes'] / 1e6:,.0f} MB beside their lengths "
        f"({memory['lengths_bytes'] / 1e6:,.0f} MB); first step {memory['cold_step_seconds']:.2f} s",
    )
    for column in ("ranks", "cap", "steps", "seconds", "of processor", "all ranks' spans listed"):
        printed.add_column(column, justify="right")
    for row in found["seconds"]:
        times = (f"{row[name]:.2f}" for name in ("clock", "processor", "all_listed"))
        printed.add_row(str(row["ranks"]), f"{row['cap']:,}", f"{row['steps']:,}", *times)
    return printed
