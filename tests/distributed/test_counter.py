"""The counter that ranks share: every number once, whatever carries it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import run

WORKER = Path(__file__).with_name("counter_worker.py")
DRAWS = 200


@pytest.mark.parametrize(
    ("launcher", "ranks", "env", "how"),
    [
        ("mpirun", 2, {}, "MPI fetch-and-op"),
        ("mpirun", 2, {"OMPI_MCA_osc": "pt2pt"}, "a thread of rank 0 (MPI makes no window"),
        ("horovodrun --gloo", 3, {}, "a thread of rank 0 (the job runs without MPI)"),
    ],
    ids=["mpi", "mpi-without-windows", "gloo"],
)
def test_every_number_is_drawn_once(launcher: str, ranks: int, env: dict[str, str], how: str, tmp_path: Path) -> None:
    command = ["python", str(WORKER), str(tmp_path), str(DRAWS)]
    finished = run(command, launcher=launcher, ranks=ranks, timeout=120, **env)
    assert finished.code == 0, finished.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert sorted(number for rank in found for number in rank["drawn"]) == list(range(DRAWS * ranks))
    assert sorted(rank["second"] for rank in found) == list(range(ranks)), "counters were meant to be apart"
    for rank in found:
        assert rank["drawn"] == sorted(rank["drawn"])
        assert rank["how"].startswith(how)
        assert rank["mpi4py"] == (launcher == "mpirun"), "a job under Gloo must not touch MPI"
