"""Using the model of a run: evaluate, generate, export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel import comm
from hvd_novel.checkpoint import resume
from hvd_novel.checkpoint.resume import Checkpoint
from hvd_novel.config import Config
from hvd_novel.corpus.genres import GENRES, recognise
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model import attention, build, export
from hvd_novel.train.evaluate import evaluate, unigram
from hvd_novel.train.generate import Sampling, generate
from hvd_novel.train.run import load_config, longest_sample, open_store, set_up_device
from hvd_novel.train.run_folder import RunFolder

_ALONE = comm.Topology(rank=0, size=1, local_rank=0, local_size=1)


@dataclass(frozen=True)
class FinishedRun:
    """A run's configuration and one of its checkpoints, loaded."""

    config: Config
    checkpoint: Checkpoint
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def evaluate_run(run: Path, *, step: int | None, device: str | None) -> dict[str, Any] | None:
    """The validation loss of a run's model beside the unigram model's; None on ranks other than 0."""
    topology = comm.init(deterministic=False)
    finished, store = comm.together(lambda: _load_with_store(run, step, device, topology), "eval.load")
    split = store.split("validation")
    result = evaluate(
        finished.model,
        split,
        topology=topology,
        compute=finished.config.compute,
        pack_tokens=_pack_tokens(finished.config, store),
        max_tokens=None,
    )
    if topology.rank != 0:
        return None
    record = result.record()
    bar = unigram(store.split("train"), split, len(finished.tokenizer)).record()["bits_per_character"]
    return {
        "step": finished.checkpoint.step,
        **record,
        "unigram_bits_per_character": bar,
        "below_unigram": 1 - record["bits_per_character"] / bar,
    }


def generate_from_run(
    run: Path, *, prompt: str, genre: str, sampling: Sampling, step: int | None, device: str | None
) -> str:
    """New text after `prompt` from a run's model."""
    known = recognise(genre)
    if known is None:
        raise UserError(f"there is no genre '{genre}'; genres: {', '.join(GENRES)}")
    finished = load(run, step=step, device=device)
    return generate(finished.model, finished.tokenizer, prompt=prompt, genre=known, sampling=sampling)


def export_run(run: Path, out: Path, *, step: int | None) -> tuple[int, float]:
    """Export a run's model to `out`; returns the step and the largest difference of logits after loading it."""
    finished = load(run, step=step, device="cpu")
    return finished.checkpoint.step, export.export(finished.model, finished.tokenizer, out)


def load(run: Path, *, step: int | None, device: str | None, topology: comm.Topology = _ALONE) -> FinishedRun:
    """Load a run's newest whole checkpoint, or that of `step`. Raises UserError if there is none."""
    config = _config(run, device)
    checkpoints = RunFolder(run).checkpoints
    checkpoint = resume.newest(checkpoints)[0] if step is None else resume.at(checkpoints, step)
    if checkpoint is None:
        raise UserError(f"the run {run} has no checkpoint yet")
    where = set_up_device(config.compute, False, topology)
    backend, _ = attention.choose("auto", where, config.compute.precision)
    tokenizer = build.load_tokenizer(checkpoint.folder)
    model = build.build(
        config.model,
        tokenizer,
        compute=config.compute,
        device=where,
        attention=backend,
        max_len=0,
        checkpoint=checkpoint.folder,
    )
    return FinishedRun(config, checkpoint, model.eval(), tokenizer)


def _load_with_store(
    run: Path, step: int | None, device: str | None, topology: comm.Topology
) -> tuple[FinishedRun, TokenStore]:
    store = open_store(_config(run, device), verify=False)
    finished = load(run, step=step, device=device, topology=topology)
    if finished.checkpoint.facts["store_fingerprint"] != store.fingerprint:
        raise UserError(f"the token store {finished.config.data.store} is not the one this run was trained on")
    if len(store.split("validation")) == 0:
        raise UserError(f"the token store {finished.config.data.store} has no validation split (too few chapters)")
    return finished, store


def _pack_tokens(config: Config, store: TokenStore) -> int:
    tokens = config.batch.micro_batch_tokens
    return longest_sample(store) if tokens == "auto" else tokens  # what trained at least fitted


def _config(run: Path, device: str | None) -> Config:
    """The run's configuration; unless told otherwise, a GPU is used only if there is one, wherever it was trained."""
    folder = RunFolder(run)
    trained_on = folder.load_tree().get("compute", {}).get("device", "auto")
    chosen = device or ("auto" if trained_on == "cuda" else trained_on)
    return load_config(folder.config, [f"compute.device={chosen}", "compute.threads=null"])
