"""The same run under every launcher and at 1, 2 and 3 ranks: equal losses, gradients and parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hvd_novel.config import Config
from hvd_novel.corpus.store import TokenStore
from hvd_novel.model.loss import IGNORE
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.packing import packs_of
from hvd_novel.train.run import load_config, make_plan
from tests.launch import hvd_novel, run

STEPS = 20
LAUNCHES = [
    ("plain", 1),
    ("mpirun", 2),
    ("mpirun", 3),
    ("horovodrun --gloo", 2),
    ("horovodrun --mpi", 2),
]
# Sums of fp32 gradients in another order, and AdamW, which divides by a small root, 20 times over.
LOSS_TOLERANCE, PARAMETER_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4, 1e-5


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def final_parameters(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def relative(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    difference = torch.cat([(got[name].double() - want[name].double()).flatten() for name in want])
    return float(difference.norm() / torch.cat([tensor.double().flatten() for tensor in want.values()]).norm())


def tokens_per_rank(config: Config, ranks: int) -> list[list[int]]:
    split = TokenStore.open(Path(config.data.store)).split("train")
    plan = make_plan(config, split, TOKENS)
    steps = (plan.step(step, [config.batch.micro_batch_tokens] * ranks).packs for step in range(STEPS))
    return [
        [sum(int((pack.labels != IGNORE).sum()) for pack in packs_of(split, packs)) for packs in step] for step in steps
    ]


@pytest.mark.timeout(900)
def test_launchers_and_ranks_agree(write_config: Callable[..., Path]) -> None:
    # Few documents a step, so that ranks train unequal numbers of tokens.
    # Some samples are longer than packs, and costs are fitted on the way.
    sections = {
        "batch": {"tokens": 700, "micro_batch_tokens": 200},
        "sharding": {"refit_every": 10},
        "log": {"every": 10},
    }
    results = {}
    for launcher, ranks in LAUNCHES:
        path = write_config(f"{launcher.replace(' ', '')}-{ranks}", **sections)
        finished = hvd_novel("train", path, launcher=launcher, ranks=ranks)
        assert finished.code == 0, finished.output
        assert finished.output.count("step 20/20") == 1, "rank 0 alone speaks"
        config = load_config(path, [])
        results[launcher, ranks] = Path(config.run.dir)
    counts = tokens_per_rank(config, 3)
    assert any(max(step) > 1.3 * max(1, min(step)) for step in counts), "the token counts were meant to differ"
    one = results["plain", 1]
    assert len(losses(one)) == STEPS
    for key, folder in results.items():
        assert_same_training(folder, one, str(key))
        cost = Cost(*last_checkpoint(folder)["plan"]["cost"])
        assert 0 < cost.of(np.array([100]))[0] < 100, "seconds, not the model's FLOP"


@pytest.mark.timeout(600)
def test_claimed_packs_of_any_size_agree_with_one_process(write_config: Callable[..., Path]) -> None:
    """Packs of the size that memory allows, claimed by whoever is free, against plain training on uncut samples."""
    plain, dynamic = (
        write_config(name, batch={"tokens": 700, "micro_batch_tokens": cap}, sharding={"steal": name == "dynamic"})
        for name, cap in (("plain", 256), ("dynamic", "auto"))
    )
    alone = hvd_novel("train", plain)
    assert alone.code == 0, alone.output
    finished = hvd_novel("train", dynamic, launcher="mpirun", ranks=3)
    assert finished.code == 0, finished.output
    assert "stealing: packs are claimed from a counter: MPI fetch-and-op" in finished.output
    folder = Path(load_config(dynamic, []).run.dir)
    assert_same_training(folder, Path(load_config(plain, []).run.dir), "dynamic")
    caps = last_checkpoint(folder)["caps"]
    assert caps == [caps[0]] * 3, "any rank may get any pack"
    assert f"packs of at most {caps[0]} tokens" in finished.output
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(0 < record["data_seconds"] < record["seconds"] for record in records if record["kind"] == "train")
    finished = hvd_novel("eval", folder)
    assert finished.code == 0, finished.output


def assert_same_training(folder: Path, reference: Path, which: str) -> None:
    assert losses(folder) == pytest.approx(losses(reference), rel=LOSS_TOLERANCE), which
    assert relative(final_parameters(folder), final_parameters(reference)) < PARAMETER_TOLERANCE, which


def last_checkpoint(folder: Path) -> dict[str, Any]:
    text = (folder / "checkpoints" / f"step-{STEPS:08d}" / "trainer.json").read_text("utf-8")
    return dict(json.loads(text))


@pytest.mark.timeout(600)
def test_gradients_equal_one_process(store: Path, tmp_path: Path) -> None:
    """The gradient of one step, with ranks that hold unequal numbers of packs, and one that holds none."""
    worker = Path(__file__).with_name("gradient_worker.py")
    tolerances = {"none": GRADIENT_TOLERANCE, "fp16": 2e-3}
    for launcher, ranks in [("plain", 1), ("mpirun", 2), ("horovodrun --gloo", 3), ("mpirun", 4)]:
        command = ["python", str(worker), str(store), str(tmp_path / str(ranks)), *tolerances]
        finished = run(command, launcher=launcher, ranks=ranks)
        assert finished.code == 0, finished.output
    for compression, tolerance in tolerances.items():
        gradients = {ranks: load_file(tmp_path / f"{ranks}.{compression}") for ranks in (1, 2, 3, 4)}
        packs = {ranks: gradients[ranks].pop("packs").tolist() for ranks in gradients}
        assert all(len(set(packs[ranks])) > 1 for ranks in (2, 3, 4)), "the numbers of packs were meant to differ"
        assert 0 in packs[4]
        for ranks in (2, 3, 4):
            assert relative(gradients[ranks], gradients[1]) < tolerance, (compression, ranks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "memory"), [("mpirun", "a window"), ("horovodrun --gloo", "a file")])
def test_plans_in_shared_memory(launcher: str, memory: str, write_config: Callable[..., Path]) -> None:
    """One copy a node, the same plan on every rank; a rank that plans another way stops all of them at once."""
    worker = Path(__file__).with_name("sharding_worker.py")
    finished = run(["python", str(worker), str(write_config())], launcher=launcher, ranks=2)
    assert finished.code == 0, finished.output
    assert f"all well in {memory}" in finished.output


def test_corpora_that_are_hardly_there(store: Path) -> None:
    """Fewer documents than ranks, one, empty ones, as long as a cap or one token longer: no rank waits for ever."""
    worker = Path(__file__).with_name("edge_worker.py")
    finished = run(["python", str(worker), str(store)], launcher="mpirun", ranks=3)
    assert finished.code == 0, finished.output
    assert "7 corpora trained on 3 ranks" in finished.output
