"""What `pip install .` installs."""

from __future__ import annotations

import configparser
import shutil
import zipfile
from pathlib import Path

from tests.conftest import ROOT
from tests.launch import run


def test_the_wheel_holds_every_module_of_both_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("hvd_novel", "compressors"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    done = run(command)
    assert done.code == 0, done.output
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        installed = {name for name in wheel.namelist() if not name.startswith("hvd_novel-")}
    expected = {
        str(path.relative_to(ROOT))
        for package in ("hvd_novel", "compressors")
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert expected <= installed
    assert not any(name.startswith("tests/") for name in installed)


def test_base_requirements_are_those_of_compressors_alone() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    base = [line.split(">")[0].strip() for line in setup["options"]["install_requires"].split("\n") if line]
    assert base == ["torch", "horovod", "numpy", "numba"]
    code = "import sys, compressors; print([m for m in ('transformers', 'pyarrow', 'hvd_novel') if m in sys.modules])"
    assert run(["python", "-c", code]).output.strip() == "[]"
