"""What happens beside the steps: evaluation, samples, checkpoints, the run's status."""

from __future__ import annotations

import time
from typing import Any

from hvd_novel.config import nearest
from hvd_novel.corpus.genres import GENRES, recognise
from hvd_novel.train.evaluate import evaluate
from hvd_novel.train.generate import Sampling, generate
from hvd_novel.train.trainer import Trainer


class Evaluate:
    """Loss on the validation split every so often, and at the end of the run."""

    def __init__(self) -> None:
        self._last = -1

    def after_step(self, trainer: Trainer) -> None:
        """Evaluate if it is time."""
        if _due(trainer.step, trainer.config.evaluate.every):
            self._evaluate(trainer)

    def at_end(self, trainer: Trainer) -> None:
        """Evaluate a finished run, unless its last step was evaluated already."""
        if not trainer.preempted and self._last != trainer.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        split = trainer.store.split("validation")
        if len(split) == 0:
            return
        result = evaluate(
            trainer.model,
            split,
            topology=trainer.topology,
            compute=trainer.config.compute,
            pack_tokens=trainer.caps[trainer.topology.replica],
            max_tokens=trainer.config.evaluate.max_tokens,
        )
        trainer.emit("eval", **result.record())
        self._last = trainer.step


class Sample:
    """A text written by the model, into the run's ``samples/``; by rank 0 alone."""

    def after_step(self, trainer: Trainer) -> None:
        """Write a sample if it is time."""
        settings = trainer.config.sample
        if trainer.topology.rank != 0 or not _due(trainer.step, settings.every) or trainer.diverged:
            return
        genre = recognise(settings.genre)
        assert genre is not None, "checked with the configuration"
        sampling = Sampling(
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            seed=trainer.config.run.seed + trainer.step,
        )
        text = generate(trainer.model, trainer.tokenizer, prompt=settings.prompt, genre=genre, sampling=sampling)
        path = trainer.folder.samples / f"step-{trainer.step:08d}.txt"
        with trainer.writing():
            path.write_text(settings.prompt + text + "\n", encoding="utf-8")
        trainer.emit("sample", prompt=settings.prompt, genre=genre, text=text)

    def at_end(self, trainer: Trainer) -> None:
        """Nothing: the last step's sample is written by `after_step`."""


def sample_problems(section: Any) -> list[tuple[str, str]]:
    """What is wrong with a raw sample section, as (key, problem) pairs."""
    genre = section.get("genre") if isinstance(section, dict) else None
    if isinstance(genre, str) and recognise(genre) is None:
        return [("genre", f"there is no genre '{genre}'; {nearest(genre, GENRES)}")]
    return []


class Save:
    """A checkpoint every so often, and at the end, finished or preempted."""

    def __init__(self) -> None:
        self._last = -1

    def after_step(self, trainer: Trainer) -> None:
        """Save if it is time."""
        if _due(trainer.step, trainer.config.checkpoint.every) and not trainer.diverged:
            self._save(trainer)

    def at_end(self, trainer: Trainer) -> None:
        """Save, unless the last step was saved already."""
        if self._last != trainer.step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        start = time.perf_counter()
        path = trainer.save()
        self._last = trainer.step
        trainer.emit("checkpoint", path=str(path), seconds=time.perf_counter() - start)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
