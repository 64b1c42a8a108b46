"""A trained model as a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hvd_novel.errors import UserError
from hvd_novel.files import disk_errors
from hvd_novel.model.build import logits

_TOLERANCE = 1e-3


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    """Write `model` and `tokenizer` to `folder`, load them back with transformers alone and compare logits.

    `model` has the attention that training uses. Returns the largest difference of the logits on a short text,
    relative to the largest of them. Written aside and renamed, so that `folder` never holds half an export. Raises
    UserError if `folder` exists and is not empty, if it cannot be written, or if it does not give the same logits.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"the export folder {folder} exists and is not empty; choose another --out or remove it")
    aside = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        with disk_errors():
            _save(model, tokenizer, aside)
        difference = _difference(model, aside)
        if not difference <= _TOLERANCE:
            raise UserError(f"the exported model does not give the run's logits (they differ by {difference:.2g})")
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the export to {folder}: {error}; make room there or choose another --out"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return difference


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    use_cache, model.config.use_cache = model.config.use_cache, True
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.config.use_cache = use_cache


def _difference(model: PreTrainedModel, folder: Path) -> float:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
    ids = AutoTokenizer.from_pretrained(folder)("第一章 雨下了一夜，天亮才停。", return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = loaded(ids).logits[0]
        ours = logits(model.eval(), ids[0], [ids.shape[1]]).cpu()
    return float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=1.0))
