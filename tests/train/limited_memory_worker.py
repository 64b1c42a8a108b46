"""Run alone: the trial under a limit on this process's memory, and a pack of the size that it found."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from hvd_novel.config import ComputeConfig
from hvd_novel.errors import UserError
from hvd_novel.sharding.packing import Pack
from hvd_novel.sharding.spans import Span
from hvd_novel.train.budget import MemoryBudget, largest_pack
from hvd_novel.train.step import pack_loss

from tests.train.test_budget import make_model  # isort: skip

compute, model = ComputeConfig(device="cpu", loss_chunk_tokens=64), make_model()
torch.set_num_threads(1)


def limit(megabytes: int) -> None:
    """Let this process have so much more address space than now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, resource.RLIM_INFINITY))


model_runs = largest_pack(model, compute, longest=64, most=128, shared_by=1)  # threads and pools are there afterwards
assert model_runs == 128
limit(40)
found = largest_pack(model, compute, longest=64, most=10**6, shared_by=1)
assert 64 < found < 10**5, found

ids = torch.arange(found) % 700
lengths = [64] * (found // 64) + ([found % 64] if found % 64 else [])
own = MemoryBudget(model, found, longest=64)
trained = []


def train(packs: Iterable[Pack]) -> float:
    trained.clear()
    for pack in packs:
        pack_loss(model, pack, compute).backward()
        trained.append(len(pack.input_ids))
    return 0.0


own.run(train, [Pack(ids, ids, [Span(0, 0, length) for length in lengths])] * 4)
own.check()
assert sum(trained) == 4 * found, "and four packs of that size can be trained, if need be in pieces"

message = ""
try:
    largest_pack(model, compute, longest=40_000, most=10**6, shared_by=1)
except UserError as error:
    message = str(error)
assert "a sample of 40000 tokens does not fit" in message, message
print("bounded, trained, too long")
