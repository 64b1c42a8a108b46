"""Run by every rank: what ranks of a node share, then a run in which rank 1 plans another way than rank 0."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from hvd_novel import comm
from hvd_novel.comm import job
from hvd_novel.config import Config
from hvd_novel.corpus.store import StoreSplit
from hvd_novel.errors import UserError
from hvd_novel.sharding.cost import Cost
from hvd_novel.sharding.plan import Plan
from hvd_novel.train import run

topology = comm.init(deterministic=False)

# One copy: what any rank writes, every rank sees.
shared = comm.shared_array(5, np.int32, "test")
assert shared.values.tolist() == [0] * 5
calls = []


def count_up(values: np.ndarray) -> None:
    values[:] = np.arange(len(values))
    calls.append(topology.rank)


shared.fill(count_up)
assert shared.values.tolist() == [0, 1, 2, 3, 4]
assert sum(map(len, comm.all_gather_object(calls, "test.calls"))) == 1, "one rank of the node fills it"
if topology.rank == topology.size - 1:
    shared.values[topology.rank] = 77
comm.all_reduce_sum([0.0], "test.written")
assert shared.values[topology.size - 1] == 77
large = comm.shared_array(3_000_000, np.int32, "test.large")
large.fill(lambda values: values.fill(7))
assert int(large.values.sum()) == 21_000_000
window = comm.controller() == "MPI"
files = [line for line in Path("/proc/self/maps").read_text().splitlines() if "hvd-novel-" in line]
assert len(files) == (0 if window else 2)
assert all(line.endswith("(deleted)") for line in files), "no file has a name any more"

# More documents than ranks in some steps, fewer in others: the plan over shared memory is everywhere the same.
lengths = comm.shared_array(400, np.int32, "test.lengths")
lengths.fill(lambda values: np.copyto(values, np.arange(400) % 90, casting="same_kind"))
for strategy in ("cost", "greedy"):
    plan = Plan(
        lengths.values, np.ones(400, np.int32), seed=1, step_tokens=300, strategy=strategy, cost=Cost(9.0, 1.0, 2.0)
    )
    seen = []
    for step in range(2 * plan.steps_per_epoch):
        planned = plan.step(step, [50] * topology.size)
        seen.append((planned.checksum, planned.documents.tolist()))
    everywhere = comm.all_gather_object(seen, f"test.plan.{strategy}")
    assert all(other == everywhere[0] for other in everywhere)
    first = sorted(d for _, documents in seen[: plan.steps_per_epoch] for d in documents)
    assert first == list(range(400))
del shared, large, lengths, plan

make_plan = run.make_plan


def misled(config: Config, split: StoreSplit, cost: Cost) -> Plan:
    plan = make_plan(config, split, cost)
    plan.strategy = "cost" if topology.rank == 0 else "random"
    return plan


run.make_plan = misled
fault = ""
try:
    run.train(run.load_config(Path(sys.argv[1]), []), Console())
except UserError as error:
    fault = str(error)
assert "planned step 1 differently" in fault, fault
faults = comm.all_gather_object(fault, "test.faults")
assert len(set(faults)) == 1


def leave_slowly() -> None:
    time.sleep(0.5 * topology.rank)
    (folder / f"left.{topology.rank}").touch()


def shut_down() -> None:
    """The first rank that comes here ends MPI for all of them."""
    assert all((folder / f"left.{rank}").exists() for rank in range(topology.size)), "a rank has not left its windows"
    end()


folder, end = Path(sys.argv[1]).parent, job.hvd.shutdown
job.at_leave.insert(0, leave_slowly)  # done last
job.hvd.shutdown = shut_down
if topology.rank == 0:
    print("all well in", "a window" if window else "a file")
comm.leave(0)
