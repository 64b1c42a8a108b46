"""Run by every rank: steps as planned and with claimed packs, ranks at different speeds and with little memory.

Each rank writes what it trained in each case; rank 0 also the gradients. `die` as second argument: rank 0 is killed
in the middle of a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import compressors
from hvd_novel import comm
from hvd_novel.config import ComputeConfig, ModelConfig
from hvd_novel.corpus.store import TokenStore
from hvd_novel.model import build
from hvd_novel.sharding.loader import Loader
from hvd_novel.sharding.packing import Pack
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.stealing import Claims
from hvd_novel.train import step as algebra
from hvd_novel.train.budget import MemoryBudget, agree

CAP, STEPS = 256, 3
out, case = Path(sys.argv[2]), sys.argv[3]
topology = comm.init(deterministic=False)
torch.set_num_threads(1)
store = TokenStore.open(Path(sys.argv[1]))
split, device, compute = store.split("train"), torch.device("cpu"), ComputeConfig(device="cpu")
torch.manual_seed(0)
section = ModelConfig.model_validate(
    {"type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
)
model = build.build(section, store.load_tokenizer(), compute=compute, device=device, attention="sdpa", max_len=256)
comm.broadcast_parameters(model)
optimizer = comm.distributed(
    compressors.DistributedOptimizer,
    torch.optim.SGD(model.parameters(), lr=0.0),
    named_parameters=model.named_parameters(),
)
plan = Plan(split.lengths, split.column("context"), seed=0, step_tokens=1200 * topology.size)
counter = comm.shared_counter("steal")


def loader_of(claims: Claims | None) -> Loader:
    return Loader(plan, split, replica=topology.replica, last_step=10, ahead=2, claims=claims, device=device)


def train(
    name: str, loader: Loader, caps: list[int], delay: Callable[[], float], budget: MemoryBudget | None = None
) -> None:
    """Train STEPS steps; note the documents of each, and keep the gradient of the last."""
    for step in range(STEPS):
        planned = loader.step(step, caps)
        documents: list[int] = []
        result = algebra.train_step(
            model,
            optimizer,
            torch.amp.GradScaler("cpu", enabled=False),
            watched(loader.packs(), documents, delay),
            trained_tokens=planned.trained_tokens,
            compute=compute,
            clip_norm=None,
            overlap=name == "static",
            within=budget.run if budget else None,
        )
        loss = comm.all_reduce_sum([result.accumulated.loss_sum], "loss")[0]
        trained[name].append({"documents": documents, "planned": planned.documents.tolist(), "loss": loss})
    if topology.rank == 0:
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        save_file(gradient, out / f"{name}.safetensors")


def watched(packs: Iterable[Pack], documents: list[int], delay: Callable[[], float]) -> Iterator[Pack]:
    for pack in packs:
        documents += [span.document for span in pack.spans]
        yield pack
        time.sleep(delay())


def killed() -> float:
    if topology.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


trained: dict[str, list[dict[str, object]]] = {name: [] for name in ("static", "random", "slow", "idle", "memory")}
caps = [CAP] * topology.size
claims = Claims(counter, topology.replicas)
if case == "die":
    with loader_of(claims) as loader:
        train("random", loader, caps, killed)
draw = random.Random(topology.rank)
with loader_of(None) as loader:
    train("static", loader, caps, lambda: 0.0)
with loader_of(claims) as loader:
    train("random", loader, caps, lambda: draw.uniform(0, 0.01))
    train("slow", loader, caps, lambda: 0.05 if topology.rank == 0 else 0.0)
    original = Claims.of

    def late(self: Claims, planned: object) -> Iterator[list[Span]]:
        """The last rank comes when all is done."""
        if topology.rank == topology.size - 1:
            time.sleep(2.0)
        yield from original(self, planned)  # type: ignore[arg-type]

    Claims.of = late  # type: ignore[method-assign]
    train("idle", loader, caps, lambda: 0.0)
    Claims.of = original  # type: ignore[method-assign]

# Rank 0 cannot get memory for packs of more than 256 tokens, and finds out in the middle of a step.
plain_loss = algebra.pack_loss


def scarce(model: torch.nn.Module, pack: Pack, compute: ComputeConfig) -> torch.Tensor:
    loss = plain_loss(model, pack, compute)  # type: ignore[arg-type]
    if topology.rank == 0 and len(pack.input_ids) > 256:
        loss.backward()
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return loss


algebra.pack_loss = scarce  # type: ignore[assignment]
budget = MemoryBudget(model, cap=900, longest=256)
with loader_of(None) as loader:
    train("memory", loader, [900] * topology.size, lambda: 0.0, budget)
(out / f"{topology.rank}.json").write_text(
    json.dumps({"trained": trained, "how": counter.how, "caps": agree(budget.cap, alike=False)})
)
comm.leave(0)
