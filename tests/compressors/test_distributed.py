"""Checks on 1, 2, 3 and 4 real ranks, under MPI and Gloo."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run_checks import all_checks

from tests.compressors.launch import LAUNCHERS, run_checks

RANKS = (1, 2, 3, 4)
_TIMEOUT = 420.0


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    @cache
    def run(launcher, ranks):
        return run_checks(launcher, ranks, tmp_path_factory.mktemp(f"{launcher}-{ranks}"), timeout=_TIMEOUT)

    return run


CASES = [
    (launcher, ranks, name)
    for launcher in LAUNCHERS
    for ranks in RANKS
    for name in ("launch", *all_checks(launcher, ranks))
]


@pytest.mark.parametrize(("launcher", "ranks", "name"), CASES)
def test_check(outcome, launcher, ranks, name):
    found = outcome(launcher, ranks)
    errors = found.get(name, [])
    assert not any(errors), "\n".join(error for error in errors if error)
    assert len(errors) == (1 if name == "launch" else ranks), f"not reached; {found['launch'][0]}"
