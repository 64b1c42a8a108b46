"""``hvd-novel launch`` for real: on one host, and on two emulated ones that two networks join."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from hvd_novel.cli import launch
from hvd_novel.errors import UserError
from tests.conftest import ROOT
from tests.launch import environment, hvd_novel

NETLAB = str(ROOT / "scripts" / "netlab")
REASON = "exit code 1: None of the TCP networks specified"
PROGRAM = ("python", "-c", "print('it runs')")
SECOND_NETWORK = """
    link add labbr2 type bridge
    link set labbr2 up
    address add 10.202.0.254/24 dev labbr2
"""
SECOND_INTERFACE = """
    link add lab2if{0} type veth peer name eth1 netns lab{0}
    link set lab2if{0} master labbr2 up
    -n lab{0} address add 10.202.0.{1}/24 dev eth1
    -n lab{0} link set eth1 up
"""


def test_a_broken_path_is_left_out_and_the_job_runs() -> None:
    """A program in Python, so that also the measuring job is started by `python -m hvd_novel`."""
    mpirun = ("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none")
    done = hvd_novel("launch", "--path", "tcp:absent0", "--path", "as-given", "--", *mpirun, *PROGRAM)
    assert done.code == 0, done.output
    assert f"left out tcp:absent0: {REASON}" in done.output
    told = re.search(r"as-given: 2 ranks on 1 host \(MPI\), (\d+) Mbit/s, (.*) ms; 25 MiB in (.*) ms", done.output)
    assert told is not None, done.output
    rate, latency, whole = map(float, told.groups())
    assert whole == pytest.approx(latency + 1000 * 8 * 25 * 2**20 / (rate * 1e6), rel=0.02)
    assert "path: as-given, the only one that works" in done.output
    assert done.output.count("it runs") == 2


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    mpirun = ["mpirun", "-np", "2", *PROGRAM]
    with pytest.raises(UserError, match=rf"no path works:\ntcp:a0: {REASON}.*\ntcp:a1: {REASON}.*\nto see .*: mpirun "):
        launch(mpirun, path=["tcp:a0", "tcp:a1"])
    with pytest.raises(UserError, match="no path is called 'pigeon'"):
        launch(mpirun, path=["pigeon"])
    with pytest.raises(UserError, match="horovodrun cannot be started: No such file"):
        launch(["/absent/horovodrun", "--gloo", *PROGRAM])
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(UserError, match="stands before mpirun or horovodrun"):
        launch(mpirun)
    assert "it runs" not in capfd.readouterr().out


@pytest.fixture
def two_networks() -> Iterator[None]:
    """Hosts lab0 and lab1; all that goes over 10.201.0.0/24 is slow, over 10.202.0.0/24 it is not."""
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "ethtool", "unshare", "mpirun"))
    if os.geteuid() != 0 or not tools:
        pytest.skip("needs root, iproute2 and ethtool")
    if subprocess.run([NETLAB, "up", "2", "100mbit"], capture_output=True, check=False).returncode:
        pytest.skip("emulated hosts are in use, or cannot be made")
    try:
        for line in (SECOND_NETWORK + "".join(SECOND_INTERFACE.format(i, i + 1) for i in range(2))).split("\n"):
            if line.strip():
                subprocess.run(["ip", *line.split()], check=True)
        yield
    finally:
        for host in range(2):  # by themselves, they would go with the hosts, but later
            subprocess.run(["ip", "link", "delete", f"lab2if{host}"], check=False)
        subprocess.run([NETLAB, "down"], check=True)
        subprocess.run(["ip", "link", "delete", "labbr2"], check=True)


@pytest.mark.usefixtures("two_networks")
def test_the_faster_network_is_taken() -> None:
    paths = [word for network in ("10.201.0.0/24", "10.202.0.0/24") for word in ("--path", f"tcp:{network}")]
    mpirun = ["mpirun", "--bind-to", "none", "-H", "lab0,lab1", "-x", "PATH", "-x", "PYTHONPATH"]
    agent = ["--mca", "plm_rsh_agent", f"{NETLAB} enter"]
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = hvd_novel(
        *("launch", *paths, "--mib", "4", "--dry-run", "--"),
        *(*mpirun, *agent, "hvd-novel", "train", "c.yaml"),
        PYTHONPATH=python_path,
        OMPI_MCA_mpi_yield_when_idle="1",
    )
    assert done.code == 0, done.output
    assert "2 ranks on 2 hosts" in done.output
    assert "path: tcp:10.202.0.0/24, the fastest" in done.output
    command = next(line for line in done.output.splitlines() if line.startswith("mpirun "))
    assert "--mca btl_tcp_if_include 10.202.0.0/24" in command
    assert command.endswith("hvd-novel train c.yaml")
