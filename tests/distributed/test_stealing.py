"""Packs claimed inside a step, and steps that run out of memory: every document once, the gradient as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.test_training import relative
from tests.launch import run

WORKER = Path(__file__).with_name("stealing_worker.py")


@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 2), ("horovodrun --gloo", 3)])
def test_every_document_once_and_the_same_gradient(launcher: str, ranks: int, store: Path, tmp_path: Path) -> None:
    finished = run(["python", str(WORKER), str(store), str(tmp_path), "all"], launcher=launcher, ranks=ranks)
    assert finished.code == 0, finished.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert found[0]["how"].startswith("MPI" if launcher == "mpirun" else "a thread of rank 0")
    static = load_file(tmp_path / "static.safetensors")
    for name in ("random", "slow", "idle", "memory"):
        assert relative(load_file(tmp_path / f"{name}.safetensors"), static) < 1e-5, name
    for name, steps in found[0]["trained"].items():
        for step, (first, reference) in enumerate(zip(steps, found[0]["trained"]["static"], strict=True)):
            mine = [rank["trained"][name][step]["documents"] for rank in found]
            counts = sorted(document for documents in mine for document in documents)
            # A step that is done over asks for the same documents again, in smaller packs, from the list of the first.
            assert counts == first["planned"] == reference["planned"], (name, step)
            assert first["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    trained: dict[str, list[list[int]]] = {
        name: [[document for step in rank["trained"][name] for document in step["documents"]] for rank in found]
        for name in found[0]["trained"]
    }
    assert len(trained["slow"][0]) < min(map(len, trained["slow"][1:])), "a slow rank leaves more to the others"
    assert trained["idle"][-1] == [], "a rank may find nothing left"
    assert 256 <= found[0]["caps"][0] < 900, "the rank with less memory has a smaller cap from then on"
    assert found[0]["caps"][1:] == [900] * (ranks - 1)


@pytest.mark.parametrize("launcher", ["horovodrun --gloo"])
def test_a_rank_that_dies_ends_the_job(launcher: str, store: Path, tmp_path: Path) -> None:
    """Rank 0 is killed, which keeps the counter: the other rank or the launcher ends it all."""
    stall: Any = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    command = ["python", str(WORKER), str(store), str(tmp_path), "die"]
    finished = run(command, launcher=launcher, ranks=2, timeout=90, **stall)
    assert finished.code != 0
    assert not list(tmp_path.glob("*.json"))
