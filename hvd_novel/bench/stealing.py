"""Step time with and without stealing when one rank is slow, on real training steps.

Each step is taken in several ways one after the other, on the same documents and from the same weights, so that
whatever else the machine does meets all of them. Run it on all ranks:

    mpirun -np 2 --bind-to none python -m hvd_novel.bench.stealing STORE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from hvd_novel import comm
from hvd_novel.bench.small_model import COMPUTE, small_model
from hvd_novel.corpus.store import TokenStore
from hvd_novel.sharding.loader import Loader
from hvd_novel.sharding.packing import Pack
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.stealing import Claims
from hvd_novel.train.step import train_step

WAYS = ("static", "late", "stealing")
"""As planned; as planned, with gradients sent after the last backward pass; and claimed, which needs that too."""


def measure(
    store: TokenStore, *, steps: int, step_tokens: int, pack_tokens: int, slow: float, width: int
) -> dict[str, float]:
    """Median seconds of a step in each of WAYS, under its name, and of all ways as a multiple of `static`.

    Rank 0 takes `slow` times as long for each pack: it sleeps for the rest. Every rank calls this, after `comm.init`
    and gets the same result. `width` is that of the model.
    """
    topology, split = comm.topology(), store.split("train")
    model, optimizer = small_model(store, width)
    plan = Plan(split.lengths, split.column("context"), seed=0, step_tokens=step_tokens)
    claims = Claims(comm.shared_counter("bench.stealing"), topology.replicas)
    loaders = {
        way: Loader(
            plan,
            split,
            replica=topology.replica,
            last_step=steps + 1,
            ahead=16,
            device=torch.device("cpu"),
            claims=claims if way == "stealing" else None,
        )
        for way in WAYS
    }
    caps = [pack_tokens] * topology.replicas
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(steps + 1):
        for way, loader in loaders.items():
            comm.all_reduce_sum([0.0], "bench.start")
            start = time.perf_counter()
            planned = loader.step(step, caps)
            train_step(
                model,
                optimizer,
                torch.amp.GradScaler("cpu", enabled=False),
                _slowed(loader.packs(), slow if topology.rank == 0 else 1.0),
                trained_tokens=planned.trained_tokens,
                compute=COMPUTE,
                clip_norm=None,
                overlap=way == "static",
            )
            if step:  # the first one warms up
                seconds[way].append(time.perf_counter() - start)
            loader.discard()  # the plan's order of documents serves one loader at a time
    return _summary(seconds)


def _slowed(packs: Iterable[Pack], factor: float) -> Iterator[Pack]:
    """`packs`, each taking `factor` times as long as it does."""
    for pack in packs:
        start = time.perf_counter()
        yield pack
        time.sleep((factor - 1) * (time.perf_counter() - start))


def _summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    slowest = {
        way: [max(times) for times in zip(*comm.all_gather_object(mine, f"bench.{way}"), strict=True)]
        for way, mine in seconds.items()
    }
    summary = {way: statistics.median(times) for way, times in slowest.items()}
    for way, times in slowest.items():
        ratios = [time / static for time, static in zip(times, slowest["static"], strict=True)]
        summary[f"{way}/static"] = statistics.median(ratios)
    return summary


def main() -> None:
    """Print the figures as a JSON object, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--pack-tokens", type=int, default=1024)
    parser.add_argument("--slow", type=float, default=2.0, help="how many times as long rank 0 takes for a pack")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    options = parser.parse_args()
    topology = comm.init(deterministic=False)
    result = measure(
        TokenStore.open(options.store),
        steps=options.steps,
        step_tokens=options.step_tokens,
        pack_tokens=options.pack_tokens,
        slow=options.slow,
        width=options.width,
    )
    if topology.rank == 0:
        print(json.dumps({"ranks": topology.size, "slow": options.slow, **result}, indent=1))
    comm.leave(0)


if __name__ == "__main__":
    main()
