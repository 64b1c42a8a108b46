"""Validation loss under compression against dense training, at equal steps, with the bytes that were sent.

Runs `hvd-novel train` itself, under a launcher, once for each scheme, learning rate and seed. Every scheme trains with
the rate that serves dense AdamW best among those offered, so that the reference is not a straw man; and, where that is
asked for, with multiples of it, in case compression wants another. So does dense, which shows whether a change of rate
helps compression or merely everything.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_novel.config import Config
from hvd_novel.errors import UserError
from hvd_novel.train.run import load_config
from hvd_novel.train.run_folder import RunFolder

Say = Callable[[str], None]
DENSE = "none"
WARM_UP = 0.15
"""Share of the steps that are dense before a scheme with a frozen variance compresses."""


@dataclass(frozen=True)
class Scheme:
    """A way to compress, as settings of the training configuration; `{warm_up}` and `{ramp}` are counts of steps."""

    settings: tuple[str, ...]
    explanation: str


_ONEBIT = ("compression.name=onebit", "optimizer.name=onebit-adam")
_TOPK = (
    "compression.name=topk",
    "compression.density=0.01",
    "compression.momentum={beta1}",
    "optimizer.name=topk-adam",
)
_FREEZE = "optimizer.freeze_step={warm_up}"
_INT8_START = "compression.warm_up=int8"

SCHEMES = {
    DENSE: Scheme((), "dense AdamW"),
    "fp16": Scheme(("compression.name=fp16",), "AdamW, fp16"),
    "int8": Scheme(("compression.name=int8",), "AdamW, unbiased int8"),
    "powersgd": Scheme(("compression.name=powersgd", "compression.rank=8"), "AdamW, PowerSGD of rank 8"),
    "powersgd-dense-start": Scheme(
        ("compression.name=powersgd", "compression.rank=8", "compression.dense_steps={warm_up}"),
        "AdamW, PowerSGD of rank 8, 15 % dense",
    ),
    "powersgd-int8": Scheme(
        (
            "compression.name=powersgd",
            "compression.rank=8",
            "compression.dense_steps={warm_up}",
            "compression.policies=[{{match: '*embed*', name: int8}}, {{match: 'lm_head*', name: int8}}]",
        ),
        "AdamW, PowerSGD of rank 8, 15 % dense, embeddings int8",
    ),
    "onebit-adam": Scheme((*_ONEBIT, _FREEZE), "OneBitAdam, 15 % dense"),
    "onebit-adam-int8": Scheme((*_ONEBIT, _FREEZE, _INT8_START), "OneBitAdam, 15 % int8"),
    "onebit-adam-free": Scheme(
        (*_ONEBIT, "optimizer.freeze_step=null", _INT8_START), "OneBitAdam, int8 until the variance is stable"
    ),
    "topk-adam": Scheme((*_TOPK, _FREEZE), "TopKAdam, 1 %, 15 % dense"),
    "topk-adam-int8": Scheme((*_TOPK, _FREEZE, _INT8_START), "TopKAdam, 1 %, 15 % int8"),
    "topk": Scheme(
        (
            "compression.name=topk",
            "compression.density=0.01",
            "compression.dense_steps={ramp}",
            "compression.ramp_steps={ramp}",
        ),
        "AdamW, top-k 1 %, 10 % dense and 10 % ramp",
    ),
}


@dataclass(frozen=True)
class Run:
    """How one training run ended."""

    scheme: str
    seed: int
    lr: float
    loss: float
    """Validation loss after the last step, nats per token."""
    bytes_sent: int
    """By all ranks in all steps, warm-up included."""
    bytes_dense: int
    """What fp32 ring all-reduces would have sent."""
    curve: list[tuple[int, float, int]]
    """(step, validation loss, bytes sent so far) at each evaluation."""
    ranks: int
    seconds: list[float]
    """Of each step, on the machine that ran it."""
    lr_factor: float = 1.0
    """`lr` / the rate that serves dense training best."""

    @property
    def times_fewer_bytes(self) -> float:
        """Than dense fp32; 1 on one rank, which sends nothing."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def label(self) -> str:
        """Of the scheme and the rate: the same for all seeds, and for nothing else."""
        explanation = SCHEMES[self.scheme].explanation
        return explanation if self.lr_factor == 1 else f"{explanation}, rate x {self.lr_factor:g}"

    @property
    def shared(self) -> dict[str, Any]:
        """What runs that differ only in their seeds share."""
        return {"scheme": self.scheme, "lr": self.lr, "lr_factor": self.lr_factor, "label": self.label}


def convergence(
    config: Path,
    overrides: Sequence[str],
    *,
    out: Path,
    schemes: Sequence[str],
    seeds: int,
    rates: Sequence[float],
    factors: Sequence[float],
    launcher: str,
    say: Say,
) -> list[Run]:
    """Tune dense training over `rates` with the first seed, then run dense and every scheme with each seed.

    All train with the tuned rate, and with each of `factors` times that rate. `launcher` is put before each
    `hvd-novel train`. Runs found finished below `out` are not repeated. Raises UserError for an unknown scheme, a
    configuration that is wrong, or a run that fails.
    """
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown:
        raise UserError(f"no scheme is called {', '.join(unknown)}; there are {', '.join(SCHEMES)}")
    checked = load_config(config, [*overrides, f"run.dir={out / 'check'}"])
    steps, beta1 = checked.schedule.steps, checked.optimizer.betas[0]
    counts = {"warm_up": max(1, int(WARM_UP * steps)), "ramp": max(1, steps // 10), "beta1": beta1}

    def run(scheme: str, seed: int, lr: float, factor: float = 1.0) -> Run:
        settings = [setting.format(**counts) for setting in SCHEMES[scheme].settings]
        folder = out / f"{scheme}-lr{lr:g}-seed{seed}"
        settings = [*overrides, f"run.dir={folder}", f"run.seed={seed}", f"optimizer.lr={lr}", *settings]
        if not _is_finished(folder, load_config(config, settings)):
            _train(config, settings, launcher)
        result = read(folder, scheme, seed, lr, factor)
        say(f"{folder.name}: validation loss {result.loss:.4f}, {result.times_fewer_bytes:.1f} times fewer bytes")
        return result

    tuning = [run(DENSE, 1, lr) for lr in rates]
    best = min(tuning, key=lambda result: result.loss)
    if len(rates) > 1 and best.lr in (min(rates), max(rates)):
        say(
            f"warning: the best rate, {best.lr:g}, is the last of those offered on its side: dense may be tuned further"
        )
    return [
        run(scheme, seed, _times(factor, best.lr), factor)
        for scheme in dict.fromkeys([DENSE, *schemes])
        for factor in dict.fromkeys([1.0, *factors])
        for seed in range(1, seeds + 1)
    ]


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each scheme and rate, by their label."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def tuned(runs: Sequence[Run], scheme: str) -> list[Run]:
    """The runs of `scheme` with the tuned rate."""
    return [run for run in runs if run.scheme == scheme and run.lr_factor == 1]


def read(folder: Path, scheme: str, seed: int, lr: float, factor: float) -> Run:
    """What the records of a finished run say."""
    sent, dense = 0, 0.0
    seconds: list[float] = []
    curve: list[tuple[int, float, int]] = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["kind"] == "train":
            sent += record["bytes_sent"]
            seconds.append(record["seconds"])
            dense += record["bytes_sent"] * record["compression_ratio"]
        elif record["kind"] == "eval":
            curve.append((record["step"], record["loss"], sent))
    ranks = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["ranks"]
    return Run(scheme, seed, lr, curve[-1][1], sent, round(dense), curve, ranks, seconds, factor)


def table(runs: Sequence[Run]) -> Table:
    """Mean and spread over seeds for each scheme and rate, against dense."""
    printed = Table(title=f"validation loss at equal steps, learning rate {tuned(runs, DENSE)[0].lr:g}")
    for column in ("scheme", "loss, mean of seeds", "lowest to highest", "against dense", "times fewer bytes"):
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in summary(runs):
        printed.add_row(
            row["label"],
            f"{row['loss']:.4f}",
            f"{row['lowest']:.4f} to {row['highest']:.4f}",
            f"{row['against_dense']:+.2%}",
            f"{row['times_fewer_bytes']:.1f}",
        )
    return printed


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each scheme and rate.

    `against_dense` is the distance of the mean loss from that of dense training with the tuned rate, relative.
    """
    reference = statistics.mean(run.loss for run in tuned(runs, DENSE))
    return [
        {
            **group[0].shared,
            "seeds": len(group),
            "loss": statistics.mean(run.loss for run in group),
            "lowest": min(run.loss for run in group),
            "highest": max(run.loss for run in group),
            "against_dense": statistics.mean(run.loss for run in group) / reference - 1,
            "times_fewer_bytes": statistics.mean(run.times_fewer_bytes for run in group),
        }
        for group in groups(runs).values()
    ]


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """All that was measured: `runs` (see `Run`) and `summary`."""
    return {"summary": summary(runs), "runs": [asdict(run) for run in runs]}


def _times(factor: float, lr: float) -> float:
    """Their product, to as many digits as names of folders have: one folder is one rate."""
    return float(f"{factor * lr:g}")


def _is_finished(folder: Path, config: Config) -> bool:
    """Whether `folder` holds a finished run; UserError if it is one of another configuration."""
    RunFolder(folder).check(config)
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text(encoding="utf-8"))["state"] == "finished"


def _train(config: Path, settings: Sequence[str], launcher: str) -> None:
    program = str(Path(sys.executable).with_name("hvd-novel"))
    done = subprocess.run(
        [*shlex.split(launcher), program, "train", str(config), *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise UserError(f"a training run of the benchmark failed with code {done.returncode}; it printed last:\n{tail}")
