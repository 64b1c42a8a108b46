"""The benchmark of training steps, on real ranks and on emulated hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from typer.testing import CliRunner

from hvd_novel.bench import peers
from hvd_novel.bench import train as bench
from hvd_novel.bench.ways import WAYS
from hvd_novel.cli import app
from hvd_novel.comm import LostRankError, hush
from hvd_novel.errors import UserError
from tests.conftest import ROOT
from tests.launch import Finished, hvd_novel, run

SMALL = ("--rounds", "2", "--width", "32", "--layers", "1", "--vocabulary", "512", "--tokens", "16")
BENCH_NETLAB = str(ROOT / "scripts" / "bench-netlab")


def ways_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["way"]: row for row in report["ways"]}


@pytest.mark.timeout(300)
def test_all_ways_train_the_same() -> None:
    """Exact exchanges, ours and DDP's, leave the mean over ranks in the gradients; nothing does without one."""
    done = hvd_novel("bench", "train", *SMALL, "--link-mbit", "1e9", "--json", launcher="mpirun", ranks=2)
    assert done.code == 0, done.output
    report = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    assert (report["ranks"], report["device"], report["settings"]["rounds"]) == (2, "cpu", 2)
    assert 0 < report["link_share"] < 0.85, "no link here carries a petabit a second"
    ways = ways_of(report)
    assert tuple(ways) == WAYS

    errors = {name: row["first_gradient_error"] for name, row in ways.items()}
    assert errors["none"] < 1e-5
    assert errors["ddp"] < 1e-5
    assert errors["ddp-powersgd"] < 1e-5, "begins densely"
    assert 1e-6 < errors["fp16"] < 1e-2
    assert 1e-6 < errors["ddp-fp16"] < 1e-2
    assert errors["compute"] > 0.1, "ranks have different tokens"
    assert errors["onebit"] > 0.1
    assert errors["topk 1 %"] > 0.1

    dense = 4 * report["parameters"]
    assert report["bytes_dense"] == ways["none"]["bytes_sent"] == dense
    assert ways["fp16"]["bytes_sent"] == pytest.approx(dense / 2, rel=0.01)
    assert ways["onebit"]["bytes_sent"] < dense / 25
    for name, row in ways.items():
        assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["seconds"])
        assert row["times_compute"] > 0
        assert row["against_none"] > 0
        assert row["against_full_link"] > 0
        sends = name not in ("compute", "ddp", "ddp-fp16", "ddp-powersgd")
        for key in ("bytes_sent", "encode", "exchange", "decode"):
            assert (row[key] is not None) == sends, (name, key)
    assert ways["compute"]["times_compute"] == ways["none"]["against_none"] == 1.0


def test_ratios_are_medians_of_rounds() -> None:
    """Ratios of the same round, not of medians; and the least that dense exchanges could take is computing itself."""
    steps: bench.Steps = {
        "compute": [(1.0,), (2.0,), (4.0,)],
        "none": [(4.0, 0, 3, 0), (4.0, 0, 3, 0), (4.0, 0, 1, 0)],
        "int8": [(2.0, 1, 0, 0), (3.0, 0, 1, 0), (4.0, 0, 1, 2)],
    }
    row = bench._way("int8", steps, tokens=30, least=6.0, sent=5, error=0.1)
    assert (row.seconds, row.tokens_per_second, row.times_compute) == (3.0, 10.0, 1.5)
    assert row.against_none == pytest.approx(4 / 3)
    assert (row.encode, row.exchange, row.decode) == (0, 1, 0)
    assert row.against_full_link == 2.0
    assert bench._way("int8", steps, 30, least=1.0, sent=5, error=0.1).against_full_link == pytest.approx(2 / 3)
    alone = bench._way("compute", {"compute": steps["compute"]}, 30, least=None, sent=None, error=1.0)
    assert (alone.against_none, alone.against_full_link, alone.encode, alone.times_compute) == (None, None, None, 1.0)


def test_threads_stand_back_and_come_again() -> None:
    if not hush.can_hush():
        pytest.skip("this user may not raise threads that it has lowered")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    hush.starting_threads(thread.start)
    try:
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == 10  # they always give way a little
        before = os.sched_getscheduler(thread.native_id)
        with hush.hushed():
            assert os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE
            assert os.sched_getscheduler(0) == before
        assert os.sched_getscheduler(thread.native_id) == before
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == 10
        assert os.getpriority(os.PRIO_PROCESS, 0) == 0
    finally:
        ended.set()
        thread.join()
    with hush.hushed():
        pass  # also where one of them has ended


def test_a_lost_rank_is_called_so_whoever_notices_it() -> None:
    """As Gloo and torch word it when another rank has gone, and an error of another kind."""
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    for error in (RuntimeError(closed), DistNetworkError("The client socket has failed")):
        with pytest.raises(LostRankError), peers.lost_ranks():
            raise error
    with pytest.raises(RuntimeError, match="shapes") as other, peers.lost_ranks():
        raise RuntimeError("shapes differ")
    assert not isinstance(other.value, LostRankError)


def test_mistakes() -> None:
    unknown = CliRunner().invoke(app, ["bench", "train", "--way", "telepathy", "--way", "none", "--way", "pigeons"])
    assert isinstance(unknown.exception, UserError)
    assert str(unknown.exception) == f"no way is called telepathy, pigeons; there are {', '.join(WAYS)}"
    alone = CliRunner().invoke(app, ["bench", "train"])
    assert isinstance(alone.exception, UserError)
    assert "start this under a launcher" in str(alone.exception)
    assert CliRunner().invoke(app, ["bench", "train", "--rounds", "0"]).exit_code == 2
    one = hvd_novel("bench", "train", launcher="mpirun", ranks=1)
    assert one.code == 2
    assert "one rank exchanges nothing" in one.output


def test_netlab_mistakes() -> None:
    done = run([BENCH_NETLAB, "--rates", "fast"])
    assert done.code == 2
    assert "'fast' is no rate; write it as 200mbit" in done.output


def hosts() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def no_hosts() -> None:
    """Skips where no hosts can be emulated, or where there are some already."""
    tools = ("ip", "tc", "ethtool", "unshare", "mpirun")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in tools):
        pytest.skip("needs root, iproute2, ethtool and util-linux")
    netlab = ROOT / "scripts" / "netlab"
    if subprocess.run([netlab, "up", "1", "1gbit"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces can be made here, or there are emulated hosts in use")
    subprocess.run([netlab, "down"], check=True)


def on_hosts(*arguments: str) -> Finished:
    root = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
    return run([BENCH_NETLAB, "--hosts", "2", *arguments], PYTHONPATH=root)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_hosts")
def test_on_emulated_hosts(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    chosen = [word for name in ("compute", "none", "ddp") for word in ("--way", name)]
    done = on_hosts("--rates", "0.5gbit", "--json", str(file), "--", *SMALL, *chosen)
    assert done.code == 0, done.output
    report = json.loads(file.read_text())["0.5gbit"]["train"]
    assert report["settings"]["link_mbit"] == 500
    assert report["link_share"] < 1.1, "the link is limited"
    assert list(ways_of(report)) == ["compute", "none", "ddp"]
    rows = [line.split("|")[1].strip() for line in done.output.splitlines() if line.startswith("|")]
    assert rows == ["way", "---", "`compute`", "`none`", "`ddp`"]
    assert "% of the link" in done.output
    assert "lab" not in hosts()

    failed = on_hosts("--rates", "unlimited", "--", "--way", "telepathy")
    assert failed.code == 1
    assert "no way is called telepathy" in failed.output
    assert "lab" not in hosts()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_hosts")
def test_hosts_are_removed_when_it_is_stopped_twice() -> None:
    """As `timeout` does: it signals the process, and then its group."""
    job = subprocess.Popen([BENCH_NETLAB, "--hosts", "2", "--rates", "unlimited"], start_new_session=True)
    try:
        while "lab1" not in hosts():
            assert job.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        for _ in range(2):
            os.killpg(job.pid, signal.SIGTERM)
            time.sleep(0.1)
        assert job.wait() == 128 + signal.SIGTERM
    finally:
        job.kill()
    assert "lab" not in hosts()
