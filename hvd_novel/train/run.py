"""From a configuration to a trained model: everything a run is made of, put together top to bottom."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import compressors
from hvd_novel import comm
from hvd_novel import config as configuration
from hvd_novel.checkpoint import resume, state, writer
from hvd_novel.checkpoint.resume import Checkpoint
from hvd_novel.config import ComputeConfig, Config
from hvd_novel.corpus.store import SPLITS, StoreSplit, TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model import attention, build
from hvd_novel.monitor.console import ConsoleSink
from hvd_novel.monitor.records import MetricsFile, Sink, TensorBoard
from hvd_novel.sharding.cost import Cost, CostModel, from_model
from hvd_novel.sharding.curriculum import Curriculum, curriculum_problems, kinds_of
from hvd_novel.sharding.loader import Loader, check_cores
from hvd_novel.sharding.packing import packs_of
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.stealing import Claims
from hvd_novel.train.auto import Auto, forecast
from hvd_novel.train.budget import MemoryBudget, agree, largest_pack
from hvd_novel.train.callbacks import Evaluate, Sample, Save, sample_problems
from hvd_novel.train.optim import compression_problems, first_compressor, make_optimizer, warm_up_compressor
from hvd_novel.train.run_folder import RunFolder
from hvd_novel.train.trainer import Trainer
from hvd_novel.train.workload import Workload

T = TypeVar("T")
Say = Callable[[str], None]


def train(config: Config, console: Console) -> bool:
    """Train as `config` says, going on from the run folder's newest checkpoint if there is one.

    Returns True if the run is finished, False if a signal stopped it after saving. Every rank calls this; a
    mistake found on one raises the same UserError on all.
    """
    topology = comm.init(deterministic=config.run.deterministic, process_sets=config.compression.name == "hierarchical")
    say: Say = _silent
    if topology.rank == 0:
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    folder = RunFolder(Path(config.run.dir))

    device = comm.together(lambda: set_up_device(config.compute, config.run.deterministic, topology), "train.device")
    store = comm.together(lambda: open_store(config, verify=topology.local_rank == 0), "train.store")
    found, faults = comm.together(lambda: _find_checkpoint(config, folder, store), "train.checkpoint")
    for fault in faults:
        say(f"warning: passing over a damaged checkpoint: {fault}")
    if found and found.step >= config.schedule.steps:
        say(f"the run in {folder.path} is finished: {found.folder} holds step {found.step}")
        return True
    say(f"ranks: {topology.size} ({comm.controller()}) | device: {device} | precision: {config.compute.precision}")
    tokenizer = store.load_tokenizer()
    model = make_model(config, store, tokenizer, device, say, checkpoint=found.folder if found else None)
    scaler = torch.amp.GradScaler(device.type, enabled=config.compute.precision == "fp16")
    optimizer = comm.distributed(
        compressors.DistributedOptimizer,
        make_optimizer(model, config.optimizer),
        named_parameters=model.named_parameters(),
        compression=first_compressor(config.compression),
        warm_up=warm_up_compressor(config.compression),
        scaler=scaler,
    )
    train_split = store.split("train")
    longest, most = store.header["max_len"], config.batch.micro_batch_tokens
    longest = longest if most == "auto" else min(longest, most)
    cost_model = CostModel(from_model(model, longest), 0 if config.run.deterministic else config.sharding.refit_every)
    plan = make_plan(config, train_split, cost_model.cost)
    say(f"model: {config.model.type or config.model.pretrained}, {_parameters(model):,} parameters")
    say(f"data: {len(train_split):,} samples, {plan.tokens:,} tokens, {plan.steps_per_epoch:,} steps an epoch")

    caps, budget = _caps(config, model, store, topology, found)
    if budget:
        sizes = " to ".join(map(str, sorted({min(caps), max(caps)})))
        say(f"batch.micro_batch_tokens=auto: packs of at most {sizes} tokens")
    claims = None
    if config.sharding.steal:
        counter = comm.shared_counter("steal")
        claims = Claims(counter, topology.replicas)
        say(f"stealing: packs are claimed from a counter: {counter.how}")
    if config.data.loader_cores:
        comm.together(partial(check_cores, config.data.loader_cores), "train.loader_cores")

    resumed_step = found.step if found else 0
    comm.together(lambda: _prepare_folder(folder, config, topology, resumed_step), "train.folder")
    sinks = comm.together(
        lambda: _open_sinks(config, console, folder, resumed_step) if topology.rank == 0 else [], "train.sinks"
    )
    trainer = Trainer(
        config=config,
        topology=topology,
        store=store,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        plan=plan,
        cost_model=cost_model,
        loader=Loader(
            plan,
            train_split,
            replica=topology.replica,
            last_step=config.schedule.steps,
            ahead=config.data.prefetch,
            device=device,
            claims=claims,
            cores=config.data.loader_cores,
        ),
        caps=caps,
        budget=budget,
        folder=folder,
        sinks=sinks,
        callbacks=[Evaluate(), Sample(), Save()],
    )
    state.seed_rank(config.run.seed, 0, topology.rank)
    if config.compression.name == "auto":
        trainer.auto = Auto(
            optimizer,
            lambda: _forecast(trainer, train_split),
            ranks=topology.size,
            recheck_every=config.compression.recheck_steps,
        )
    if found:
        trainer.resume(found)
        say(f"resuming at step {trainer.step} from {found.folder}")
        if found.facts["world_size"] != topology.size:
            say(
                f"warning: the checkpoint was written by {found.facts['world_size']} ranks and there are "
                f"{topology.size} now: the same documents form the same steps, but dropout draws anew"
            )
    _fit(trainer, folder)
    return not trainer.preempted


def load_config(path: Path, overrides: list[str]) -> Config:
    """The configuration in `path` with `overrides`, checked to the last key, its paths absolute. Raises UserError."""
    checks = {
        "model": build.architecture_problems,
        "compression": compression_problems,
        "curriculum": curriculum_problems,
        "sample": sample_problems,
    }
    return configuration.with_absolute_paths(configuration.load(path, overrides, checks))


def set_up_device(compute: ComputeConfig, deterministic: bool, topology: comm.Topology) -> torch.device:
    """The device of this rank, with threads and determinism set. Raises UserError if it is not there."""
    torch.set_num_threads(compute.threads or max(1, len(os.sched_getaffinity(0)) // topology.local_size))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if compute.device == "cpu" or (compute.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
        raise UserError(
            f"compute.device=cuda, but no CUDA device can be used (torch {torch.__version__} is built {built}); "
            "set compute.device=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    if topology.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {topology.local_rank} has no GPU: {torch.cuda.device_count()} here; start fewer ranks a node"
        )
    torch.cuda.set_device(topology.local_rank)
    return torch.device("cuda", topology.local_rank)


def open_store(config: Config, *, verify: bool = True) -> TokenStore:
    """The token store, checked. `verify` reads and hashes every byte of it."""
    return TokenStore.open(Path(config.data.store), verify=verify)


def make_model(
    config: Config,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    say: Say,
    checkpoint: Path | None = None,
) -> PreTrainedModel:
    """The model, with the same weights on every rank: new ones, or those of `checkpoint`. All ranks call this."""
    backend, reason = comm.together(
        lambda: attention.choose(config.compute.attention, device, config.compute.precision),
        "train.attention",
    )
    say(f"attention: {backend} ({reason})")
    torch.manual_seed(config.run.seed)
    model = comm.together(
        lambda: build.build(
            config.model,
            tokenizer,
            compute=config.compute,
            device=device,
            attention=backend,
            max_len=store.header["max_len"],
            stretch=config.curriculum.enabled,
            checkpoint=checkpoint,
        ),
        "train.model",
    )
    comm.broadcast_parameters(model)
    return model


def make_plan(config: Config, split: StoreSplit, cost: Cost) -> Plan:
    """The plan of a run over `split`; all ranks call this together. Raises UserError if there is nothing to train."""
    lengths = comm.shared_array(len(split), np.int32, "plan.lengths")
    lengths.fill(lambda values: split.copy_column("length", values))
    return Plan(
        lengths.values,
        split.column("context"),
        seed=config.run.seed,
        step_tokens=config.batch.tokens,
        strategy=config.sharding.strategy,
        cost=cost,
        curriculum=Curriculum(config.curriculum, config.schedule.steps, kinds_of(split))
        if config.curriculum.enabled
        else None,
    )


def longest_sample(store: TokenStore) -> int:
    """Tokens of the longest sample in any split."""
    return max(int(store.split(split).lengths.max(initial=0)) for split in SPLITS)


def _caps(
    config: Config, model: PreTrainedModel, store: TokenStore, topology: comm.Topology, found: Checkpoint | None
) -> tuple[list[int], MemoryBudget | None]:
    """Most tokens in a pack of each replica, and what lowers them where they are found by trial."""
    tokens = config.batch.micro_batch_tokens
    if tokens != "auto":
        return [tokens] * topology.replicas, None
    longest = longest_sample(store)
    if found and found.facts["world_size"] == topology.size:
        caps = found.trainer()["caps"]
    else:
        trial = partial(
            largest_pack,
            model,
            config.compute,
            longest=longest,
            most=-(-config.batch.tokens // topology.replicas) + longest,  # about a replica's largest share of a step
            shared_by=topology.local_size,
        )
        caps = agree(comm.together(trial, "train.trial"), alike=config.sharding.steal)
    return caps, MemoryBudget(model, caps[topology.replica], longest)


def _forecast(trainer: Trainer, split: StoreSplit) -> dict[str, float]:
    """Seconds of the next step under each scheme that may be chosen."""
    trainer.loader.discard()  # its thread must not plan at the same time
    planned = trainer.plan.step(trainer.step, trainer.caps)
    packs = list(packs_of(split, planned.packs[trainer.topology.replica]))
    workload = Workload(trainer.model, packs, trainer.config.compute)
    return forecast(trainer.model, workload, overlap=trainer.overlaps, ranks=trainer.topology.size)


def _find_checkpoint(config: Config, folder: RunFolder, store: TokenStore) -> tuple[Checkpoint | None, list[str]]:
    folder.check(config)
    found, faults = resume.newest(folder.checkpoints)
    if found and found.facts["store_fingerprint"] != store.fingerprint:
        raise UserError(
            f"the token store {config.data.store} is not the one that {found.folder} was trained on; "
            "point data.store to that one, or choose another run.dir"
        )
    return found, faults


def _prepare_folder(folder: RunFolder, config: Config, topology: comm.Topology, step: int) -> None:
    if topology.rank == 0:
        folder.create(config, {"ranks": topology.size, "controller": comm.controller()})
        with folder.writing():
            writer.remove_unfinished(folder.checkpoints)
            writer.set_aside_after(folder.checkpoints, step)
            folder.status("running", step)


def _open_sinks(config: Config, console: Console, folder: RunFolder, step: int) -> list[Sink]:
    """Where the records of a run go that stands at `step`."""
    with folder.writing():
        return [
            ConsoleSink(
                console,
                first_step=step,
                steps=config.schedule.steps,
                every=config.log.every,
                # Launchers give ranks a pseudo-terminal of their own, whatever their output goes to.
                bar=console.is_terminal and not comm.launched(),
            ),
            MetricsFile(folder.metrics, step),
            *([TensorBoard(folder.tensorboard, step)] if config.log.tensorboard else []),
        ]


def _fit(trainer: Trainer, folder: RunFolder) -> None:
    """Train, and leave the truth about how it ended in status.json."""
    state_at_end = "failed"
    try:
        trainer.fit()
        state_at_end = "preempted" if trainer.preempted else "finished"
    finally:
        trainer.loader.close()
        for sink in trainer.sinks:
            with trainer.writing():
                sink.close()
        if trainer.topology.rank == 0:
            with trainer.writing():
                folder.status(state_at_end, trainer.step)
    trainer.check_written()


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _silent(line: str) -> None:
    pass
