"""Finding and reading the checkpoint to go on from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hvd_novel.checkpoint import manifest, writer
from hvd_novel.errors import UserError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    folder: Path
    step: int
    facts: dict[str, Any]

    def optimizer(self) -> dict[str, torch.Tensor]:
        """See `state.optimizer_tensors`."""
        return load_file(self.folder / "optimizer.safetensors")

    def rank_states(self, rank: int, size: int) -> list[dict[str, Any]]:
        """What each rank had alone: for the same number of ranks that of `rank`, otherwise that of all of them."""
        written = range(self.facts["world_size"])
        needed = [rank] if size == len(written) else written
        paths = [self.folder / "ranks" / writer.rank_file(other) for other in needed]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]

    def trainer(self) -> dict[str, Any]:
        """Step, loss scale and counters."""
        return dict(json.loads((self.folder / "trainer.json").read_text(encoding="utf-8")))


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint in `folder` and the faults of newer ones that had to be passed over.

    None if there is no checkpoint at all. Raises UserError if there are some and all are damaged.
    """
    faults: list[str] = []
    for step in reversed(writer.steps(folder)):
        try:
            return at(folder, step), faults
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError(
            f"no checkpoint in {folder} can be used:\n  " + "\n  ".join(faults) + "\n  remove them to start anew"
        )
    return None, []


def at(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of `step`. Raises UserError if it is absent or damaged."""
    path = folder / writer.name(step)
    if not path.is_dir():
        there = ", ".join(map(str, writer.steps(folder))) or "none"
        raise UserError(f"there is no checkpoint of step {step} in {folder}; there are: {there}")
    try:
        facts = manifest.read(path)
    except manifest.DamagedError as error:
        raise UserError(f"checkpoint {path} is damaged: {error}") from None
    return Checkpoint(path, step, facts)
