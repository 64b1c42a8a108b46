"""Writing checkpoints. Layout of a run's ``checkpoints/``:

    step-00000100/            model.safetensors, config.json ...   the model in its own Hugging Face format
                              tokenizer files
                              optimizer.safetensors                 see `state.optimizer_tensors`
                              ranks/rank-00000.pt ...               what each rank has alone: generators, residuals
                              trainer.json                          step, loss scale, counters
                              MANIFEST.json                         written last
    latest                    the name of the newest one, swapped atomically

Every rank takes part: `begin` on one, then `write_rank` on all, then `commit` on one. Until then nothing that was
there before is touched.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel.checkpoint import manifest
from hvd_novel.errors import UserError
from hvd_novel.files import disk_errors, replace_text

_ASIDE = ".writing-"
_NAME = re.compile(r"step-(\d{8})")


def begin(folder: Path, step: int) -> None:
    """Make room for checkpoint `step` in `folder`. Raises UserError if it cannot be written, like all here."""
    aside = _aside(folder, step)
    with _explained(folder, step):
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "ranks").mkdir(parents=True)


def write_rank(folder: Path, step: int, rank: int, state: dict[str, Any]) -> None:
    """Write what `rank` has alone: a dict of tensors, numbers, strings and dicts of such."""
    ranks = _aside(folder, step) / "ranks"
    if not ranks.is_dir():
        raise UserError(f"rank {rank} does not see {folder}: run.dir must be on a file system that all ranks share")
    with _explained(folder, step):
        torch.save(state, ranks / rank_file(rank))


def commit(
    folder: Path,
    step: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: dict[str, torch.Tensor],
    trainer: dict[str, Any],
    facts: dict[str, Any],
    keep: int,
) -> Path:
    """Write what all ranks have in common, make the checkpoint valid, and drop all but the newest `keep`.

    `facts` go into the manifest. Returns the checkpoint's folder.
    """
    target, aside = folder / name(step), _aside(folder, step)
    with _explained(folder, step):
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        save_file(optimizer, aside / "optimizer.safetensors")
        (aside / "trainer.json").write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        manifest.write(aside, {"step": step, **facts})
        shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step, which resume passed over
        aside.rename(target)
        replace_text(folder / "latest", f"{target.name}\n")
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / name(old), ignore_errors=True)
    return target


def name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """File name of what a rank has alone."""
    return f"rank-{rank:05d}.pt"


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending, damaged ones included."""
    names = (path.name for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the checkpoints after `step`, which could not be used, so that no later one is dropped for them."""
    for damaged in steps(folder):
        if damaged > step:
            path = folder / name(damaged)
            shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
            path.rename(path.with_suffix(".damaged"))


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed writer left behind."""
    for path in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _aside(folder: Path, step: int) -> Path:
    return folder / f"{_ASIDE}{name(step)}"


@contextmanager
def _explained(folder: Path, step: int) -> Iterator[None]:
    """Turn a failure to write into a UserError, and remove what was written."""
    try:
        with disk_errors():
            yield
    except OSError as error:
        shutil.rmtree(_aside(folder, step), ignore_errors=True)
        reason = error.strerror or error
        raise UserError(
            f"cannot write checkpoint {folder / name(step)}: {reason}; earlier checkpoints are untouched. "
            "Free some space or mend the folder's permissions, then start the same command again to resume"
        ) from None
