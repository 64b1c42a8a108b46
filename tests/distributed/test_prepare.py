"""Preparing on several ranks: the same store, whoever did what; one message for a mistake; a lost rank does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hvd_novel.corpus.prepare import prepare
from hvd_novel.corpus.store import TokenStore
from tests.conftest import ROOT
from tests.corpus.corpora import OPTIONS, contents, mixed_corpus
from tests.corpus.test_epub import write_epub
from tests.corpus.texts import novel
from tests.launch import HVD_NOVEL, finish, hvd_novel, kill, run, start

WORKER = Path(__file__).with_name("prepare_worker.py")
ARGUMENTS = [part for name, value in OPTIONS.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind; one is much longer than the others, one is there twice, one has chapters of a few tokens."""
    folder = mixed_corpus(tmp_path_factory.mktemp("prepare") / "books")
    (folder / "giant.txt").write_text(novel(150), encoding="utf-16")
    (folder / "again.txt").write_text(novel(4), encoding="utf-8")
    (folder / "again, too.txt").write_text(novel(4), encoding="gb18030")
    (folder / "short.txt").write_text("\n".join(f"第{n}章\n雨{n}。" for n in range(1, 900)), encoding="utf-8")
    write_epub(folder / "book.epub")
    return folder


@pytest.mark.timeout(600)
def test_the_store_does_not_depend_on_the_ranks(books: Path, tmp_path: Path) -> None:
    single, useless = tmp_path / "single.txt", tmp_path / "useless.txt"
    single.write_text("雨。", encoding="utf-8")
    useless.write_bytes(b"")
    prepare([books], tmp_path / "mixed", **OPTIONS)
    prepare([single], tmp_path / "single", **OPTIONS)
    for launcher, ranks in [("mpirun", 2), ("mpirun", 3), ("horovodrun --gloo", 2)]:
        out = tmp_path / f"{launcher.replace(' ', '')}-{ranks}"
        command = ["python", str(WORKER), *map(str, (out, books, single, useless))]
        done = run(command, launcher=launcher, ranks=ranks, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.output
        for name in ("mixed", "single"):
            assert contents(out / name) == contents(tmp_path / name), (launcher, ranks)
        message = (out / "message").read_text(encoding="utf-8")
        assert message.startswith("none of the files can be used (useless.txt: the novel has no text)")
        assert sorted(path.name for path in out.iterdir()) == ["message", "mixed", "single"], "nothing is left behind"


@pytest.mark.timeout(300)
def test_a_mistake_is_one_message(books: Path, tmp_path: Path) -> None:
    done = hvd_novel("prepare", books, "--out", books, *ARGUMENTS, launcher="mpirun", ranks=2)
    assert done.code == 2, done.output
    assert done.output.count("error: ") == 1, done.output
    assert "exists and is not a token store; choose another folder or remove it" in done.output
    assert "Traceback" not in done.output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_killed_rank_leaves_the_old_store(tmp_path: Path, launcher: str) -> None:
    long, short, out = tmp_path / "long.txt", tmp_path / "short.txt", tmp_path / "store"
    long.write_text(novel(1500), encoding="utf-8")
    short.write_text(novel(2), encoding="utf-8")
    prepare([short], out, **OPTIONS)
    before = contents(out)
    process = start([HVD_NOVEL, "prepare", str(long), "--out", str(out), *ARGUMENTS], launcher=launcher, ranks=2)
    wait_for(tmp_path, ".store.*.partial/scratch/tokens.1", process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(rank_one(family), signal.SIGKILL)
    done = finish(process, timeout=120)
    assert done.code != 0, done.output
    assert contents(out) == before
    psutil.wait_procs(family, timeout=60)
    prepare([short], out, **OPTIONS)
    assert TokenStore.open(out).novels["title"].to_pylist() == ["short"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.txt", "short.txt", "store"]


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Return as soon as a file below `folder` fits `pattern`."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if list(folder.glob(pattern)):
            return
        time.sleep(0.01)
    kill(process)
    raise AssertionError(f"no {pattern} in {timeout} s; it printed:\n{process.communicate()[0]}")


def rank_one(family: list[psutil.Process]) -> int:
    """The process that prepares as rank 1."""
    for member in family:
        environment = member.environ()
        rank = environment.get("OMPI_COMM_WORLD_RANK") or environment.get("HOROVOD_RANK")
        if rank == "1" and HVD_NOVEL in member.cmdline():
            return member.pid
    raise AssertionError(f"no rank 1 among {family}")
