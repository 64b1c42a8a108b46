"""Directions that imports must not take, and what the examples promise."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "compressors").rglob("*.py"))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_two_modules_touch_horovod_and_none_the_pipeline(file):
    imported = re.findall(r"^\s*(?:import|from) ([\w.]+)", file.read_text(), re.MULTILINE)
    allowed = {"exchange.py", "optimizer.py"}
    assert not any(name.startswith("hvd_novel") for name in imported)
    assert file.name in allowed or not any(name.startswith("horovod") for name in imported)
    if file.parent.name == "codecs":
        ours = {name for name in imported if name.startswith("compressors")}
        assert ours <= {"compressors", "compressors.codec", "compressors.kernels"}, "codecs are pure"


def test_the_examples_differ_in_two_lines():
    plain, compressed = (
        (ROOT / "examples" / "horovod" / name).read_text().splitlines() for name in ("train.py", "train_compressed.py")
    )
    changes = [line for line in difflib.ndiff(plain, compressed) if line[0] in "+-" and line[2:].strip()]
    assert [line[0] for line in changes] == ["+", "-", "+"]
    assert changes[0] == "+ import compressors"
    assert "compressors.DistributedOptimizer" in changes[2]
