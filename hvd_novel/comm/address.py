"""Where ranks find each other by TCP, for what does not run over Horovod."""

from __future__ import annotations

import contextlib
import socket

import psutil

from hvd_novel.comm.job import all_gather_object, topology
from hvd_novel.errors import UserError

_WAIT_SECONDS = 3.0


def address_of_first(port: int, name: str) -> tuple[str, int]:
    """The IPv4 address at which every rank reaches rank 0, and rank 0's `port`, open there on all interfaces.

    Collective; what others give for `port` does not count. Hosts need no names. Raises UserError if there is no such
    address.
    """
    topo = topology()
    alone = topo.local_size == topo.size
    own = [address for address in _interfaces() if address.startswith("127.") == alone]
    candidates, port = all_gather_object((own, port), f"{name}.candidates")[0]
    reached = all_gather_object([_reaches(address, port) for address in candidates], f"{name}.reached")
    for address, by_ranks in zip(candidates, zip(*reached, strict=True), strict=True):
        if all(by_ranks):
            return address, port
    raise UserError(
        f"the ranks cannot all reach rank 0 by TCP, at any of {', '.join(candidates)}; "
        "connections between the job's hosts must be let through"
    )


def interface_towards(address: str) -> str:
    """The name of the interface by which this rank reaches `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return _interfaces()[probe.getsockname()[0]]


def _interfaces() -> dict[str, str]:
    """Names of this host's interfaces by their IPv4 addresses."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def _reaches(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_WAIT_SECONDS):
        return True
    return False
