"""The scripts: the README's first command for real, and what stops a set-up."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.launch import run

TOOLS = (
    *("bash", "env", "dirname", "realpath", "cat", "sha256sum", "cut", "mkdir", "df", "awk"),
    *("ls", "tail", "head", "grep", "tr", "mktemp", "rm", "mv", "nproc"),
)
SETUP = str(ROOT / "scripts" / "setup")


@pytest.mark.timeout(900)
def test_quickstart_does_the_main_job(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "quickstart"), str(ROOT / "examples" / "stories"), str(tmp_path)]
    done = run(command, timeout=800, HVD_NOVEL_VENV=sys.prefix)
    assert done.code == 0, done.output

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    bits = [record["bits_per_character"] for record in records if record["kind"] == "eval"]
    assert bits[-1] < 0.97 * bits[0], "bits per character fall"
    assert bits[-1] < 1.01 * min(bits), "and have not begun to rise"
    below = re.search(r"below the unigram model\W+([\d.]+)%", done.output)
    assert below is not None
    assert float(below.group(1)) >= 10

    sample = (tmp_path / "sample.txt").read_text("utf-8")
    letters = [char for char in sample if not char.isspace()]
    assert len(letters) > 50
    assert sum("\u4e00" <= char <= "\u9fff" for char in letters) >= 0.6 * len(letters)
    assert "\ufffd" not in sample
    AutoTokenizer.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    again = run(command, HVD_NOVEL_VENV=sys.prefix)
    assert again.code == 0, again.output
    assert "is finished" in again.output


def tools(folder: Path, without: tuple[str, ...] = (), **scripts: str) -> str:
    """A PATH with what the set-up calls, `without` some, and with `scripts` in place of others."""
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    (folder / "python3").symlink_to(os.path.realpath(sys.executable))
    for name in ("c++", "g++", "clang++"):
        if (found := shutil.which(name)) and name not in without:
            (folder / name).symlink_to(found)
    for name, text in scripts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def set_up(tmp_path: Path, path: str, **env: str) -> str:
    done = run(
        [SETUP],
        PATH=path,
        HVD_NOVEL_VENV=str(tmp_path / "venv"),
        HVD_NOVEL_CACHE=str(tmp_path / "cache"),
        CXX="",
        **env,
    )
    assert done.code == 1, done.output
    assert done.output.count("set-up failed: ") == 1, done.output
    assert "remedy: " in done.output
    return done.output


def test_set_up_without_a_compiler(tmp_path: Path) -> None:
    output = set_up(tmp_path, tools(tmp_path / "bin", without=("c++", "g++", "clang++")))
    assert "no C++ compiler (looked for c++, g++, clang++)" in output


def test_set_up_without_disk_space(tmp_path: Path) -> None:
    full = 'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "/dev/x 9 9 1048576 99% /"'
    output = set_up(tmp_path, tools(tmp_path / "bin", df=full))
    assert "no disk space: 1 GB free" in output


def test_set_up_without_network(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    output = set_up(
        tmp_path,
        tools(tmp_path / "bin"),
        PIP_CONFIG_FILE="/dev/null",
        PIP_INDEX_URL=nowhere,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
    )
    assert "the package index cannot be reached" in output


def test_set_up_with_an_old_python(tmp_path: Path) -> None:
    old = 'case "$*" in *version_info*) exit 1 ;; esac; echo "Python 3.6.0"'
    assert "Python 3.6.0 is too old" in set_up(tmp_path, tools(tmp_path / "bin", python3=old))


def test_gpu_check_says_when_there_is_no_gpu() -> None:
    done = run(["python", str(ROOT / "scripts" / "gpu-check")], CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert "no CUDA device" in done.output
