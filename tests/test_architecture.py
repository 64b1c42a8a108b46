"""Dependencies point one way; see the contracts in setup.cfg."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.launch import run


def test_imports_keep_their_directions() -> None:
    done = run(["lint-imports", "--config", str(ROOT / "setup.cfg"), "--no-cache"])
    assert done.code == 0, done.output
