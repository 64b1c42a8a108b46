"""Paths by name, commands taken apart, and trials that fail; nothing of Horovod is started."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvd_novel.errors import UserError
from hvd_novel.paths import templates
from hvd_novel.paths.command import Command, Launcher
from hvd_novel.paths.fastest import choose
from hvd_novel.paths.trial import PathError, measure
from tests.conftest import ROOT
from tests.launch import environment

MPIRUN = ["mpirun", "-np", "2", "hvd-novel", "train", "c.yaml"]
BOX = """[host:12] [[2,0],0] ORTE_ERROR_LOG: Out of resource in file show_help.c
--------------------------
It is so: there was no
way, but it is long.

  Host: unable
--------------------------"""
TRACEBACK = """[0]<stderr>:Traceback (most recent call last):
[0]<stderr>:  File "a.py", line 1, in <module>
[0]<stderr>:    raise AnError(cannot)
[0]<stderr>:AnError: it cannot be"""
UCX = "[1.5] [host:7 :0] ucp_context.c:12 UCX  WARN  network device 'mlx9' is not available, please use 'eth0'(tcp)"
TCP = "--mca pml ob1 --mca btl vader,tcp,self --mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1"


def words(name: str, launcher: Launcher, command: list[str], *, nccl: bool = False) -> str:
    return " ".join(templates.named(name, launcher, nccl=nccl).of(Command.parse(command)))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks; loopback, an interface that is down, and one without an IPv4 address."""
    up, down = SimpleNamespace(isup=True), SimpleNamespace(isup=False)
    states = {"lo": up, "eth0": up, "eth1": up, "eth2": down, "eth3": up, "eth4": up}

    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    addresses = {
        "lo": [address("127.0.0.1")],
        "eth0": [address("02:00", socket.AF_PACKET), address("10.0.0.1")],
        "eth1": [address("10.1.0.1")],
        "eth2": [address("10.2.0.1")],
        "eth3": [address("fe80::1", socket.AF_INET6)],
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(templates, "active_ports", lambda: ["mlx5_0:1"])


@pytest.mark.usefixtures("host")
def test_paths_are_those_of_the_host_that_the_launcher_can_be_told() -> None:
    tcp = ["as-given", "tcp:eth0", "tcp:eth1"]
    assert templates.here(Launcher.MPIRUN, nccl=False) == [*tcp, "rdma:mlx5_0:1"]
    assert templates.here(Launcher.HOROVODRUN_MPI, nccl=False) == tcp
    assert templates.here(Launcher.HOROVODRUN_GLOO, nccl=True) == tcp
    assert templates.here(Launcher.HOROVODRUN_GLOO, nccl=False) == ["as-given"]


def test_ports_of_adapters_that_have_a_link(tmp_path: Path) -> None:
    assert templates.active_ports(tmp_path / "infiniband") == []
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE\n"), ("mlx5_0/ports/2", "1: DOWN\n"), ("a/ports/1", "4: ACTIVE")):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state)
    assert templates.active_ports(tmp_path) == ["a:1", "mlx5_0:1"]


def test_launchers_are_told() -> None:
    program = "hvd-novel train c.yaml"
    mpi = ["horovodrun", "--mpi", "-np", "2", *program.split()]
    gloo = ["horovodrun", "--gloo", "-np", "2", *program.split()]
    nccl = "env NCCL_SOCKET_IFNAME=eth1 NCCL_IB_DISABLE=1"
    assert words("as-given", Launcher.MPIRUN, MPIRUN, nccl=True) == " ".join(MPIRUN)
    assert words("tcp:eth1", Launcher.MPIRUN, MPIRUN) == f"mpirun {TCP} -np 2 {program}"
    assert words("tcp:eth1", Launcher.MPIRUN, MPIRUN, nccl=True) == f"mpirun {TCP} -np 2 {nccl} {program}"
    told = f"horovodrun --network-interfaces eth1 --mpi -np 2 {program}"
    assert words("tcp:eth1", Launcher.HOROVODRUN_MPI, mpi) == told
    told = f"horovodrun --gloo -np 2 {nccl} {program}"
    assert words("tcp:eth1", Launcher.HOROVODRUN_GLOO, gloo, nccl=True) == told
    ucx = "--mca pml ucx --mca opal_common_ucx_devices any --mca opal_common_ucx_tls any"
    told = f"mpirun {ucx} -np 2 env UCX_NET_DEVICES=mlx5_0:1 {program}"
    assert words("rdma:mlx5_0:1", Launcher.MPIRUN, MPIRUN) == told
    for name, launcher, message in (
        ("tcp:eth1", Launcher.HOROVODRUN_GLOO, "launch by mpirun"),
        ("rdma:mlx5_0:1", Launcher.HOROVODRUN_MPI, "launch by mpirun"),
        ("tcp:", Launcher.MPIRUN, "no path is called 'tcp:'"),
        ("pigeon", Launcher.MPIRUN, "no path is called 'pigeon'"),
    ):
        with pytest.raises(UserError, match=message):
            templates.named(name, launcher, nccl=False)


def test_commands_are_taken_apart(tmp_path: Path) -> None:
    folder = tmp_path / "hvd-novel"
    folder.mkdir()
    job = Command.parse(
        ["timeout", "9h", "/opt/bin/mpirun", "--wdir", str(folder), "numactl", "-l", "python3.11", "x.py"]
    )
    assert job.start == ("timeout", "9h", "/opt/bin/mpirun")
    assert job.options == ("--wdir", str(folder), "numactl", "-l")
    assert job.program == ("python3.11", "x.py")
    assert " ".join(job.measuring(2.5).program) == "python3.11 -m hvd_novel bench link --mib 2.5 --json"
    assert Command.parse(MPIRUN).measuring(25).program[:3] == ("hvd-novel", "bench", "link")
    for command, message in (
        (["srun", "hvd-novel", "train"], "no launcher in"),
        (["mpirun", "-np", "2", "./a.out"], "no hvd-novel or python after mpirun"),
        ([*MPIRUN, ":", *MPIRUN[1:]], "several programs"),
    ):
        with pytest.raises(UserError, match=message):
            Command.parse(command)


def test_launchers_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", environment()["PATH"])
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'HYDRA build details: Version 4.2'\n")
    other.chmod(0o755)
    assert Command.parse(MPIRUN).launcher is Launcher.MPIRUN
    assert Command.parse(["horovodrun", "--mpi", "python"]).launcher is Launcher.HOROVODRUN_MPI
    assert Command.parse(["horovodrun", "--gloo", "python"]).launcher is Launcher.HOROVODRUN_GLOO
    for command, message in (
        ([str(other), "python"], "is not Open MPI's"),
        (["/absent/mpirun", "python"], "/absent/mpirun cannot be started: No such file"),
        (["horovodrun", "python", "--gloo"], "say --mpi or --gloo"),
        (["horovodrun", "--mpi", "--network-interfaces", "eth0", "python"], "leave out --network-interfaces"),
    ):
        with pytest.raises(UserError, match=message):
            _ = Command.parse(command).launcher


def test_the_fastest_is_chosen_and_ties_stay_as_given() -> None:
    assert choose({"as-given": 1.06, "tcp:a": 1.0, "tcp:b": 2.0}) == "tcp:a"
    assert choose({"tcp:a": 1.0, "as-given": 1.05, "tcp:b": 2.0}) == "as-given"
    assert choose({"tcp:a": 1.0, "tcp:b": 0.99}) == "tcp:b"


def test_a_trial_tells_why_it_failed() -> None:
    for script, message in (
        ("echo '[1,0]<stderr>:- Warning' >&2; echo '[0]<stderr>: none of it works' >&2; exit 3", "3: none of it works"),
        (f"echo '{BOX}' >&2; exit 3", "3: It is so: there was no way, but it is long.$"),
        (f"echo '{TRACEBACK}' >&2; exit 3", "3: AnError: it cannot be"),
        (f'echo "{UCX}"', "^network device 'mlx9' is not available"),
        ("echo whatever >&2; exit 4", "4: whatever"),
        ("exit 5", "5: it said nothing"),
        ("kill -9 $$", "-9: it said nothing"),
        ("echo '{}'", "printed no figures"),
        ("sleep 60", "no answer within 0.3 s"),
    ):
        with pytest.raises(PathError, match=message):
            measure(["sh", "-c", script], 0.3 if "sleep" in script else 60)
    with pytest.raises(UserError, match="absent cannot be started"):
        measure(["absent"], 60)


def test_nothing_of_a_trial_outlives_a_signal(tmp_path: Path) -> None:
    """Not even a rank in a session of its own that does not heed the launcher's end."""
    note = tmp_path / "pid"
    rank = f"trap : TERM; echo $$ > {note}; sleep 300; sleep 300"
    script = f"from hvd_novel.paths.trial import measure; measure(['sh', '-c', \"setsid sh -c '{rank}' & wait\"], 300)"
    trial = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    while not (note.exists() and note.read_text()):
        assert trial.poll() is None
        time.sleep(0.05)
    left = psutil.Process(int(note.read_text()))
    trial.send_signal(signal.SIGTERM)
    assert trial.wait(30) == 128 + signal.SIGTERM
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_nothing_of_a_trial_outlives_a_second_interrupt(tmp_path: Path) -> None:
    """Which comes while a launcher that does not heed its end is waited for."""
    begun, told = tmp_path / "begun", tmp_path / "told"
    launcher = f"trap 'echo > {told}' TERM; echo $$ > {begun}; sleep 300 & wait; wait"
    script = (
        "import signal; from hvd_novel.paths.trial import measure; "
        f"signal.signal(signal.SIGINT, signal.default_int_handler); measure(['sh', '-c', \"{launcher}\"], 300)"
    )
    trial = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    for note in (begun, told):
        while not (note.exists() and note.read_text()):
            assert trial.poll() is None
            time.sleep(0.05)
        trial.send_signal(signal.SIGINT)
    assert trial.wait(30) == -signal.SIGINT
    assert not psutil.pid_exists(int(begun.read_text()))
