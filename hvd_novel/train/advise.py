"""``hvd-novel advise``: what each compressor would make of a step, here and on other networks and numbers of ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import compressors
from compressors.rehearsal import Rehearsal
from hvd_novel import comm
from hvd_novel.config import Config
from hvd_novel.errors import UserError
from hvd_novel.sharding.cost import from_model
from hvd_novel.sharding.packing import Pack, packs_of
from hvd_novel.train.optim import make_optimizer
from hvd_novel.train.run import make_model, make_plan, open_store, set_up_device
from hvd_novel.train.step import train_step, update
from hvd_novel.train.workload import Workload
from hvd_novel.tuning.measure import measure_coding, measure_link, slowest
from hvd_novel.tuning.model import Link, Work, break_even, predict
from hvd_novel.tuning.schemes import DENSE, SAFE, SCHEMES, choose

Say = Callable[[str], None]
_ROUNDS = 3
"""Of updates, and of coding."""
_BLOCK = 2
"""Steps of a scheme before it is another's turn; the first does not count."""


def advise(
    config: Config, *, ranks: Sequence[int], mbit: Sequence[float], latency: float, turns: int, say: Say
) -> dict[str, Any] | None:
    """Measure and predict; every rank calls this, and rank 0 gets the findings, others None.

    `ranks` and `mbit` (megabits a second) are predicted for besides what is there. A process alone has no network: it
    takes each of `mbit` with rounds of `latency` seconds, and that backward hides what it can. `turns`: of measured
    steps of each scheme, 0 for none.

    * ``ranks``, ``controller``, ``parameters``; ``work``: see `Work`, of a rank in a step; ``link``: see `Link`, with
      ``mbit`` by kind of collective; null where one process has none
    * ``schemes``: a row for each: ``scheme``, ``settings``, ``safe`` (needs no other optimizer or schedule),
      ``bytes_sent`` (a rank's, in a step), ``coding``, ``wire``, ``hidden``, ``predicted`` and ``measured`` seconds
      (null if not measured), ``error`` (predicted / measured - 1), ``break_even_mbit`` (from which on dense is as
      fast; null for infinite); empty for a process alone
    * ``elsewhere``: a row for each number of ranks, rate and scheme: ``ranks``, ``mbit`` (null for the link measured),
      ``scheme``, ``seconds``, ``bytes_sent``, ``coding``; a rank computes as much as here
    * ``recommended``: a scheme, null for a process alone

    Raises UserError as training would, and where there is nothing to predict.
    """
    topology = comm.init(deterministic=False)
    if topology.size == 1 and not mbit:
        raise UserError(
            "one process exchanges nothing: start this under a launcher, such as mpirun -np 2, or give a network to "
            "predict for, such as --mbit 1000 --ranks 8"
        )
    trial = _Trial(config, topology, say)
    say("timing packs")
    work = trial.work()
    say(f"a step computes for {work.seconds:.3g} s, and can hide {work.overlapping:.3g} s of exchange")
    link = None
    if topology.size > 1:
        say("timing the network")
        link = measure_link(trial.device, trial.workload.run if work.overlapping else None)
    schemes: list[dict[str, Any]] = []
    if link:
        say("timing encoding and decoding")
        rehearsed = measure_coding(trial.parameters, SCHEMES, topology.size, rounds=_ROUNDS)
        measured = trial.steps(turns) if turns else {}
        schemes = _schemes(work, link, rehearsed, measured)
    found = {
        "ranks": topology.size,
        "controller": comm.controller(),
        "parameters": sum(parameter.numel() for _, parameter in trial.parameters),
        "work": asdict(work),
        "link": _described(link) if link else None,
        "schemes": schemes,
        "elsewhere": [row for count in ranks for row in _elsewhere(trial, work, link, count, mbit, latency, say)],
        "recommended": choose({row["scheme"]: row["measured"] or row["predicted"] for row in schemes})
        if schemes
        else None,
    }
    return found if topology.rank == 0 else None


class _Trial:
    """The configured model on this rank, and one step's packs. Nothing is learned: the learning rate is 0."""

    def __init__(self, config: Config, topology: comm.Topology, say: Say) -> None:
        cap = config.batch.micro_batch_tokens
        if cap == "auto":
            raise UserError(
                "batch.micro_batch_tokens=auto is found by trial when training begins; give a number, such as "
                "batch.micro_batch_tokens=8192"
            )
        self._compute, self._clip = config.compute, config.optimizer.clip_norm
        self.device = comm.together(lambda: set_up_device(config.compute, False, topology), "advise.device")
        store = comm.together(lambda: open_store(config, verify=False), "advise.store")
        self._model = make_model(config, store, store.load_tokenizer(), self.device, say)
        self.parameters = list(self._model.named_parameters())
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=config.compute.precision == "fp16")
        self._optimizer = comm.distributed(
            compressors.DistributedOptimizer,
            make_optimizer(self._model, config.optimizer.model_copy(update={"name": "adamw", "lr": 0.0})),
            named_parameters=self.parameters,
            compression=compressors.get(**SCHEMES[DENSE]),
            scaler=self._scaler,
        )
        split = store.split("train")
        plan = make_plan(config, split, from_model(self._model, min(store.header["max_len"], cap)))
        planned = plan.step(0, [cap] * topology.replicas)
        self._trained_tokens = max(1, planned.trained_tokens)
        self._packs: list[Pack] = list(packs_of(split, planned.packs[topology.replica]))
        self._overlaps = not config.sharding.steal
        self.workload = Workload(self._model, self._packs, config.compute)

    def work(self) -> Work:
        """What a rank computes in a step, the update included."""
        self._step()  # makes the optimizer's state
        packs = self.workload.measure(overlap=self._overlaps)
        for _, parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        updates = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            with self._optimizer.skip_synchronize():
                update(self._optimizer, self._scaler, self._clip)
            updates.append(slowest(time.perf_counter() - start))
        return Work(packs.seconds + statistics.median(updates), packs.overlapping)

    def steps(self, turns: int) -> dict[str, float]:
        """Seconds of a real step by each scheme: medians of steps taken in turns, of the slowest rank."""
        times: dict[str, list[float]] = {name: [] for name in SCHEMES}
        for _ in range(turns):
            for name, settings in SCHEMES.items():
                self._optimizer.set_compression(compressors.get(**settings))
                for _ in range(_BLOCK):
                    taken = self._step()
                times[name].append(taken)
        return {name: slowest(statistics.median(taken)) for name, taken in times.items()}

    def _step(self) -> float:
        comm.all_reduce_sum([0.0], "advise.start")
        start = time.perf_counter()
        train_step(
            self._model,
            self._optimizer,
            self._scaler,
            self._packs,
            trained_tokens=self._trained_tokens,
            compute=self._compute,
            clip_norm=self._clip,
            overlap=self._overlaps,
        )
        return time.perf_counter() - start


def _schemes(
    work: Work, link: Link, rehearsed: Mapping[str, Rehearsal], measured: Mapping[str, float]
) -> list[dict[str, Any]]:
    rows = []
    for name, exchange in rehearsed.items():
        expected = predict(work, link, exchange)
        seconds = measured.get(name)
        rows.append(
            {
                "scheme": name,
                "settings": SCHEMES[name],
                "safe": name in SAFE,
                "bytes_sent": expected.bytes_sent,
                "coding": expected.coding,
                "wire": expected.wire,
                "hidden": expected.hidden,
                "predicted": expected.seconds,
                "measured": seconds,
                "error": expected.seconds / seconds - 1 if seconds else None,
                "break_even_mbit": _mbit(break_even(work, link, rehearsed[DENSE], exchange)),
            }
        )
    return rows


def _elsewhere(
    trial: _Trial, work: Work, link: Link | None, ranks: int, mbit: Sequence[float], latency: float, say: Say
) -> list[dict[str, Any]]:
    """Rows for one number of ranks: at each of `mbit`, and at the rates measured."""
    say(f"rehearsing {ranks} ranks")
    rehearsed = measure_coding(trial.parameters, SCHEMES, ranks, rounds=1)
    base = link or Link.uniform(ranks=ranks, rate=1.0, latency=latency)
    links: dict[float | None, Link] = {None: base.at(ranks=ranks)} if link else {}
    links |= {rate: base.at(ranks=ranks, rate=rate * 1e6 / 8) for rate in mbit}
    return [
        {
            "ranks": ranks,
            "mbit": rate,
            "scheme": name,
            "seconds": (expected := predict(work, place, exchange)).seconds,
            "bytes_sent": expected.bytes_sent,
            "coding": expected.coding,
        }
        for rate, place in links.items()
        for name, exchange in rehearsed.items()
    ]


def _described(link: Link) -> dict[str, Any]:
    return {
        "round_seconds": link.round_seconds,
        "hop_seconds": link.hop_seconds,
        "overlap": link.overlap,
        "mbit": {kind.value: _mbit(rate) for kind, rate in link.rates.items()},
    }


def _mbit(rate: float) -> float | None:
    return 8 * rate / 1e6 if math.isfinite(rate) else None
