"""The link between the ranks of a job, and what an exchange of gradients takes on it.

Keys of the JSON object: `ranks`, `hosts`, `controller`; `round_seconds` (an all-reduce of one number),
`bytes_per_second` (that a rank sends in large collectives, by kind) and `seconds` (an all-reduce of the size asked for:
`round_seconds` + bytes / rate).
"""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from compressors.ledger import ring_all_reduce_bytes
from compressors.rehearsal import Kind
from hvd_novel import comm
from hvd_novel.bench.ranks import several_ranks
from hvd_novel.tuning.measure import measure_link


def measure(mib: float) -> dict[str, Any]:
    """Every rank calls this; for all-reduces of `mib` MiB. Raises UserError if there is one rank only."""
    topology = several_ranks()
    torch.set_num_threads(1)
    link = measure_link(_device(topology))
    sent = ring_all_reduce_bytes(round(mib * 2**20), topology.size)
    return {
        "ranks": topology.size,
        "hosts": round(comm.all_reduce_sum([topology.local_rank == 0], "bench.hosts")[0]),
        "controller": comm.controller(),
        "round_seconds": link.round_seconds,
        "bytes_per_second": {kind.value: rate for kind, rate in link.rates.items()},
        "seconds": link.round_seconds + sent / link.rates[Kind.ALL_REDUCE],
    }


def table(found: dict[str, Any], mib: float) -> Table:
    """Latency, rates in Mbit/s, and the exchange."""
    printed = Table(
        title=f"{found['ranks']} ranks on {found['hosts']} host(s), {found['controller']}", show_header=False
    )
    printed.add_row("an all-reduce of one number", f"{1000 * found['round_seconds']:.2f} ms")
    for kind, rate in found["bytes_per_second"].items():
        printed.add_row(f"a rank sends in {kind}", f"{8 * rate / 1e6:.0f} Mbit/s")
    printed.add_row(f"an all-reduce of {mib:g} MiB, from these", f"{1000 * found['seconds']:.1f} ms")
    return printed


def _device(topology: comm.Topology) -> torch.device:
    """A GPU where Horovod exchanges what is on it by NCCL; otherwise bytes go through the host in any case."""
    if not (comm.nccl_built() and torch.cuda.is_available()):
        return torch.device("cpu")
    torch.cuda.set_device(topology.local_rank)
    return torch.device("cuda", topology.local_rank)
