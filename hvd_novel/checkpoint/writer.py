"""Writing checkpoints. Layout of a run's ``checkpoints/``:

step-00000100/            model.safetensors, config.json ...   the model in its own Hugging Face format
                          tokenizer files
                          optimizer.safetensors                 see `state.optimizer_tensors`
                          random.safetensors                    generators, ``{rank}.{cpu|cuda}``
                          trainer.json                          step, loss scale, counters
                          MANIFEST.json                         written last
latest                    the name of the newest one, swapped atomically
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel.checkpoint import manifest
from hvd_novel.errors import UserError
from hvd_novel.files import replace_text

_ASIDE = ".writing-"


def save(
    folder: Path,
    step: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: dict[str, torch.Tensor],
    random: list[dict[str, torch.Tensor]],
    trainer: dict[str, Any],
    facts: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint `step` into `folder` and drop all but the newest `keep`; returns the checkpoint's folder.

    Called on one rank; `random` holds the generators of all ranks, `facts` go into the manifest. Nothing that was
    there before is touched until the new one is whole. Raises UserError if it cannot be written.
    """
    target, aside = folder / name(step), folder / f"{_ASIDE}{name(step)}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        save_file(optimizer, aside / "optimizer.safetensors")
        by_rank = {f"{rank}.{key}": value for rank, state in enumerate(random) for key, value in state.items()}
        save_file(by_rank, aside / "random.safetensors")
        (aside / "trainer.json").write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        manifest.write(aside, {"step": step, "world_size": len(random), **facts})
        shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step, which resume passed over
        aside.rename(target)
        replace_text(folder / "latest", f"{target.name}\n")
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"cannot write checkpoint {target}: {error.strerror or error}; earlier checkpoints are untouched. "
            "Free some space or mend the folder's permissions, then start the same command again to resume"
        ) from None
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / name(old), ignore_errors=True)
    return target


def name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending, damaged ones included."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-????????") if path.is_dir())


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed writer left behind."""
    for path in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)
