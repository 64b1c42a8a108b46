"""Rehearsals and measurements on real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch import run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 2), ("horovodrun --gloo", 3)])
def test_rehearsed_bytes_are_those_of_real_exchanges(launcher: str, ranks: int) -> None:
    done = run([sys.executable, str(Path(__file__).with_name("worker.py"))], launcher=launcher, ranks=ranks)
    assert done.code == 0, done.output
    assert done.output.count("all is as rehearsed") == ranks
