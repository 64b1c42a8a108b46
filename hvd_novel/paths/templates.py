"""Paths by name, and how a launcher is told to take them.

``as-given``    the command as it stands
``tcp:IFACE``   TCP through the interface IFACE of every host; ranks of one host keep to their shared memory
``rdma:PORT``   InfiniBand or RoCE by UCX through a port of an adapter, such as ``mlx5_0:1``; with Open MPI only

Where Horovod is built with NCCL, the same path is set for it. What is set for NCCL has not been tried, and UCX over
Ethernet only.

Gloo cannot be told: Horovod 0.28.1 heeds HOROVOD_GLOO_IFACE where ranks find each other, but for collectives it makes
another context without it (`GlooContext::InitializeForProcessSet`), which takes the address that the host's own name
stands for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as File

import psutil

from hvd_novel.errors import UserError
from hvd_novel.paths.command import Command, Launcher

AS_GIVEN = "as-given"


@dataclass(frozen=True)
class Path:
    """What makes a launcher take it."""

    name: str
    options: tuple[str, ...] = ()
    """Of the launcher, before those that the user gave."""
    variables: dict[str, str] = field(default_factory=dict)
    """Set for the ranks, over what the launcher sets."""

    def of(self, command: Command) -> list[str]:
        """The words of `command`, launched by this path."""
        setting = ["env", *(f"{name}={value}" for name, value in self.variables.items())] if self.variables else []
        return [*command.start, *self.options, *command.options, *setting, *command.program]


def here(launcher: Launcher, *, nccl: bool) -> list[str]:
    """Names of the paths that this host has and `launcher` can be told, the one as given first."""
    names = interfaces() if nccl or launcher is not Launcher.HOROVODRUN_GLOO else []
    ports = active_ports() if launcher is Launcher.MPIRUN else []
    return [AS_GIVEN, *(f"tcp:{name}" for name in names), *(f"rdma:{port}" for port in ports)]


def named(name: str, launcher: Launcher, *, nccl: bool) -> Path:
    """The path of that name; `nccl` says whether Horovod uses it where there are GPUs.

    Raises UserError if there is no such name, or the launcher cannot be told.
    """
    if name == AS_GIVEN:
        return Path(AS_GIVEN)
    kind, _, place = name.partition(":")
    if kind not in _KINDS or not place:
        raise UserError(f"no path is called '{name}'; there are {AS_GIVEN}, tcp:INTERFACE and rdma:PORT")
    return _KINDS[kind](name, place, launcher, nccl)


def _tcp(name: str, interface: str, launcher: Launcher, nccl: bool) -> Path:
    of_nccl = {"NCCL_SOCKET_IFNAME": interface, "NCCL_IB_DISABLE": "1"} if nccl else {}
    if launcher is Launcher.HOROVODRUN_GLOO:
        if nccl:
            return Path(name, (), of_nccl)
        raise UserError(f"{name}: Gloo always takes the address that a host's name stands for; launch by mpirun")
    if launcher is Launcher.HOROVODRUN_MPI:  # tells Open MPI
        return Path(name, ("--network-interfaces", interface), of_nccl)
    settings = {
        "pml": "ob1",
        "btl": "vader,tcp,self",  # vader is shared memory
        "btl_tcp_if_include": interface,
        "oob_tcp_if_include": interface,
    }
    return Path(name, _mca(settings), of_nccl)


def _rdma(name: str, port: str, launcher: Launcher, nccl: bool) -> Path:
    if launcher is not Launcher.MPIRUN:
        raise UserError(f"{name}: horovodrun keeps Open MPI to TCP; launch by mpirun for RDMA")
    of_nccl = {"NCCL_IB_HCA": port, "NCCL_IB_DISABLE": "0"} if nccl else {}
    # Without `any`, Open MPI takes UCX on Mellanox adapters only; which one it is to be is said to UCX itself.
    settings = {"pml": "ucx", "opal_common_ucx_devices": "any", "opal_common_ucx_tls": "any"}
    return Path(name, _mca(settings), {"UCX_NET_DEVICES": port, **of_nccl})


_KINDS: dict[str, Callable[[str, str, Launcher, bool], Path]] = {"tcp": _tcp, "rdma": _rdma}


def _mca(settings: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for name, value in settings.items() for word in ("--mca", name, value))


def interfaces() -> list[str]:
    """Interfaces of this host that are up and have an IPv4 address, without loopback."""
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    return [
        name
        for name, state in states.items()
        if state.isup
        and any(
            entry.family == socket.AF_INET and not entry.address.startswith("127.") for entry in addresses.get(name, [])
        )
    ]


def active_ports(adapters: File = File("/sys/class/infiniband")) -> list[str]:
    """Ports of this host's InfiniBand and RoCE adapters that have a link, as ``ADAPTER:NUMBER``."""
    states = sorted(adapters.glob("*/ports/*/state"))
    return [f"{state.parts[-4]}:{state.parts[-2]}" for state in states if "ACTIVE" in state.read_text()]
