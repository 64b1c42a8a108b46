"""The folder of a run and what is kept in it.

config.yaml         the configuration as resolved (defaults, file, command line)
environment.json    versions, git revision, launcher, ranks of the latest start
status.json         running | finished | preempted | failed, with step and time
metrics.jsonl       see `monitor.records`
tensorboard/  samples/  checkpoints/
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import yaml

from hvd_novel import config as configuration
from hvd_novel.config import Config
from hvd_novel.errors import UserError
from hvd_novel.files import replace_text

# What may change between the starts of one run: it does not alter what is learned. (The store may move; that it is the
# same one, its fingerprint shows.)
_FREE = (
    *("run.dir", "data.store", "data.prefetch", "data.loader_cores", "compute.threads"),
    *("log.", "evaluate.", "sample.", "checkpoint."),
)
# What a start killed before it wrote config.yaml may have left.
_FIRST = {"checkpoints", "samples", ".lock", ".config.yaml.tmp"}
_PACKAGES = (
    "hvd-novel",
    "torch",
    "horovod",
    "transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "mpi4py",
    "flash-attn",
)


class RunFolder:
    """Paths and small files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self.config, self.metrics = path / "config.yaml", path / "metrics.jsonl"
        self.checkpoints, self.samples, self.tensorboard = (
            path / "checkpoints",
            path / "samples",
            path / "tensorboard",
        )

    def check(self, config: Config) -> None:
        """Raise UserError if the folder belongs to a run of another configuration, or to something else."""
        if not self.path.exists():
            return
        if not self.config.exists():
            if not self.path.is_dir() or {path.name for path in self.path.iterdir()} - _FIRST:
                raise UserError(f"run.dir={self.path} exists and is not a run folder; choose another run.dir")
            return
        before, now = dict(_flat(self.load_tree())), dict(_flat(config.model_dump(mode="json")))
        changed = [
            f"  {key}: {before.get(key)!r} there, {now.get(key)!r} now"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(_FREE)
        ]
        if changed:
            raise UserError(
                f"run.dir={self.path} belongs to a run of another configuration:\n"
                + "\n".join(changed)
                + "\n  choose another run.dir, or remove the folder to start anew"
            )

    def create(self, config: Config, facts: dict[str, Any]) -> None:
        """Make the folder, or take it up again, and describe this start in it.

        Raises UserError if another process uses it until this one ends, or if it cannot be written.
        """
        with self.writing():
            for folder in (self.checkpoints, self.samples):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            replace_text(self.config, configuration.dump(config))
            replace_text(
                self.path / "environment.json",
                json.dumps(_environment() | facts, indent=1, ensure_ascii=False),
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError in the block, which writes to the folder, into a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write to run.dir={self.path}: {error.strerror or error}; checkpoints are untouched. Free some "
                "space or mend the folder's permissions, then start the same command again"
            ) from None

    def _take_lock(self) -> None:
        """Keep other processes from using this run folder until this one ends."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run.dir={self.path} is in use by another run; wait for it, or choose another") from None

    def status(self, state: str, step: int, **facts: Any) -> None:
        """Replace status.json."""
        record = {"state": state, "step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
        replace_text(self.path / "status.json", json.dumps(record, indent=1))

    def load_tree(self) -> dict[str, Any]:
        """The configuration of the run, unvalidated. Raises UserError if this is no run folder."""
        try:
            return dict(yaml.safe_load(self.config.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, TypeError, ValueError):
            raise UserError(f"{self.path} is not a run folder: it has no readable config.yaml") from None


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _environment() -> dict[str, Any]:
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "host": platform.node(),
        "git_revision": _git_revision(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision of the source this runs from, with ``+changes`` if the tree differs; None outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        revision = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
