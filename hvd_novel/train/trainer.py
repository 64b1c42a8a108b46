"""The loop, and nothing else. Evaluation, samples and checkpoints hang on it as callbacks."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel import comm
from hvd_novel.checkpoint import state, writer
from hvd_novel.checkpoint.resume import Checkpoint
from hvd_novel.config import Config
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.monitor.records import Sink
from hvd_novel.sharding.cost import CostModel, Measured
from hvd_novel.sharding.ledger import Ledger
from hvd_novel.sharding.loader import Loader
from hvd_novel.sharding.plan import Plan, StepPlan
from hvd_novel.train.auto import Auto, Decision
from hvd_novel.train.budget import MemoryBudget, agree
from hvd_novel.train.optim import learning_rate
from hvd_novel.train.run_folder import RunFolder
from hvd_novel.train.step import train_step

_MOST_SKIPPED = 20
_DIVERGED = "lower optimizer.lr, or use compute.precision=bf16 in place of fp16. Nothing was saved since it went wrong"


class Callback(Protocol):
    """Something that happens beside the steps. Called on every rank, in the same order."""

    def after_step(self, trainer: Trainer) -> None:
        """After each optimizer step; `trainer.step` counts it already."""

    def at_end(self, trainer: Trainer) -> None:
        """After the last step of this start, finished or preempted."""


class Trainer:
    """The state of a run and the loop over its steps."""

    def __init__(
        self,
        *,
        config: Config,
        topology: comm.Topology,
        store: TokenStore,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        optimizer: Any,
        scaler: torch.amp.GradScaler,
        plan: Plan,
        cost_model: CostModel,
        loader: Loader,
        caps: list[int],
        budget: MemoryBudget | None,
        folder: RunFolder,
        sinks: Sequence[Sink],
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.topology = config, topology
        self.store, self.tokenizer = store, tokenizer
        self.plan, self.loader, self.budget = plan, loader, budget
        self.caps = caps
        """Most tokens in a pack of each replica."""
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.folder, self.sinks, self.callbacks = folder, sinks, callbacks
        self.cost_model = cost_model
        self.auto: Auto | None = None
        """Chooses the compressor, where the configuration leaves that open."""
        self.ledger = Ledger()
        self.step = 0
        self.total_trained_tokens = 0
        self.preempted = False
        self.diverged = False
        """Whether the last step's loss was not finite: nothing worth keeping."""
        self._skipped = 0
        self._signalled = False
        self._unwritten = ""  # why something could not be written

    @property
    def overlaps(self) -> bool:
        """Whether gradients travel during the backward pass of a step's last pack."""
        return self.budget is None and not self.config.sharding.steal

    def fit(self) -> None:
        """Train to the last step, or until a signal reached any rank (then `preempted` is true on all)."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while self.step < self.config.schedule.steps and not self.preempted:
            if self.auto:
                self._emit_decision(self.auto.before_step(self.step))
            record = self._train_step()
            self.emit("train", **record)
            if self.auto:
                self._emit_decision(self.auto.after_step(record["seconds"], record["tokens"]))
            for callback in self.callbacks:
                callback.after_step(self)
        if self.diverged:
            raise UserError(f"the loss is not finite at step {self.step}, the last one; {_DIVERGED}")
        for callback in self.callbacks:
            callback.at_end(self)
        self.check_written()

    def emit(self, kind: str, **values: Any) -> None:
        """Send a record to the sinks (rank 0 has some, other ranks none)."""
        for sink in self.sinks:
            with self.writing():
                sink.emit({"kind": kind, "step": self.step, **values})

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For what rank 0 writes alone to the run's folder: where it cannot, all ranks stop after the next step."""
        try:
            with self.folder.writing():
                yield
        except UserError as error:
            self._unwritten = self._unwritten or str(error)

    def check_written(self) -> None:
        """Raise UserError on all ranks if one could not write; all call this."""
        comm.together(self._check_written, "train.written")

    def _check_written(self) -> None:
        if self._unwritten:
            raise UserError(self._unwritten)

    def _emit_decision(self, decision: Decision | None) -> None:
        if decision is not None:
            self.emit("compression", **decision)

    def save(self) -> Path:
        """Write a checkpoint of this moment; on every rank, returns or fails on all of them together."""
        checkpoints, rank = self.folder.checkpoints, self.topology.rank
        alone = {"random": state.random_state(), "compression": self.optimizer.compression_state_dict()}
        comm.together(lambda: writer.begin(checkpoints, self.step) if rank == 0 else None, "checkpoint.begin")
        comm.together(lambda: writer.write_rank(checkpoints, self.step, rank, alone), "checkpoint.rank")
        comm.together(lambda: self._commit() if rank == 0 else None, "checkpoint.commit")
        return checkpoints / writer.name(self.step)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`, whose weights the model already has."""
        trainer = checkpoint.trainer()
        state.load_optimizer_tensors(self.optimizer, self.model, checkpoint.optimizer())
        state.load_group_numbers(self.optimizer, trainer["optimizer_groups"])
        ranks = checkpoint.rank_states(self.topology.rank, self.topology.size)
        if self.auto:
            self.auto.load_state_dict(trainer["auto"])
        self.optimizer.load_compression_state_dict([alone["compression"] for alone in ranks])
        self.step, self.total_trained_tokens = trainer["step"], trainer["total_trained_tokens"]
        self.scaler.load_state_dict(trainer["scaler"])
        self.plan.load_state_dict(trainer["plan"])
        self.cost_model.cost = self.plan.cost
        self.ledger = Ledger(**trainer["ledger"])
        if checkpoint.facts["world_size"] == self.topology.size:
            state.set_random_state(ranks[0]["random"])
        else:
            state.seed_rank(self.config.run.seed, self.step, self.topology.rank)

    def _train_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        waited = self.loader.waited
        planned = self.loader.step(self.step, self.caps)
        rate = learning_rate(self.step, self.config.optimizer.lr, self.config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = train_step(
            self.model,
            self.optimizer,
            self.scaler,
            self.loader.packs(),
            trained_tokens=max(1, planned.trained_tokens),
            compute=self.config.compute,
            clip_norm=self.config.optimizer.clip_norm,
            overlap=self.overlaps,
            within=self.budget.run if self.budget else None,
        )
        waited = self.loader.waited - waited
        sent = self.optimizer.ledger.last
        tight = self.budget is not None and self.budget.changed
        accumulated = result.accumulated
        loss_sum, signalled, tights, unwritten, waited, bytes_sent, bytes_dense, *counts = comm.all_reduce_sum(
            [
                *(accumulated.loss_sum, float(self._signalled), float(tight), float(bool(self._unwritten)), waited),
                *(sent.bytes_sent, sent.bytes_dense, planned.checksum, planned.checksum**2),
                *(accumulated.tokens, accumulated.trained_tokens),
            ],
            "train.step",
        )
        if unwritten:
            self.check_written()
        self._check_plan(*map(int, counts[:2]))
        self.plan.settle()
        if tights:
            self._agree_on_caps()
        self.preempted = signalled > 0
        self.step += 1
        self._account(planned, *map(int, counts[2:]))
        self._refit(accumulated.packs)
        self.total_trained_tokens += planned.trained_tokens
        self._watch(loss_sum, result.updated)
        seconds = time.perf_counter() - start
        return {
            "loss": loss_sum / max(1, planned.trained_tokens),
            "grad_norm": result.grad_norm,
            "lr": rate,
            "epoch": self.step / self.plan.steps_per_epoch,
            "tokens": planned.tokens,
            "trained_tokens": planned.trained_tokens,
            "total_trained_tokens": self.total_trained_tokens,
            "packs": sum(map(len, planned.costs)),
            "bytes_sent": int(bytes_sent),
            "compression_ratio": bytes_dense / bytes_sent if bytes_sent else 1.0,
            "seconds": seconds,
            "data_seconds": waited / self.topology.size,
            "tokens_per_second": planned.tokens / seconds,
            "memory_bytes": _peak_memory(self.model.device),
            "updated": int(result.updated),
        }

    def _check_plan(self, checksums: int, squares: int) -> None:
        """All checksums are equal if and only if the mean of their squares is the square of their mean."""
        if self.topology.size * squares != checksums**2:
            raise UserError(
                f"ranks planned step {self.step + 1} differently; nothing was saved since. "
                "All must run the same version of this program and read the same token store"
            )

    def _account(self, planned: StepPlan, tokens: int, trained: int) -> None:
        """Count the step's tokens, and close the account at the end of the epoch."""
        self.ledger.add(
            documents=len(planned.documents),
            empty_documents=int((self.plan.lengths[planned.documents] == 0).sum()),
            planned=planned.trained_tokens,
            trained=trained,
            masked=tokens - trained,
        )
        if self.step % self.plan.steps_per_epoch == 0:
            account = self.ledger.close(len(self.plan.lengths), self.plan.tokens)
            self.emit("ledger", epoch=planned.epoch + 1, **account)
            assert account["unexplained"] == 0, f"the tokens of the epoch do not add up: {account}"
            self.ledger = Ledger()

    def _refit(self, packs: list[Measured]) -> None:
        self.cost_model.observe(packs)
        if self.cost_model.due(self.step):
            measured = comm.all_gather_object(self.cost_model.measured, "train.cost.measured")
            cost = self.cost_model.refit([pack for packs in measured for pack in packs])
            self.loader.discard()  # what was planned ahead with the old cost
            # Linear algebra may round differently on another processor: that of rank 0 counts.
            self.plan.cost = self.cost_model.cost = comm.all_gather_object(cost, "train.cost")[0]

    def _agree_on_caps(self) -> None:
        assert self.budget is not None
        comm.together(self.budget.check, "train.memory")
        self.caps = agree(self.budget.cap, alike=self.config.sharding.steal)
        self.budget.changed = False

    def _watch(self, loss_sum: float, updated: bool) -> None:
        self.diverged = not math.isfinite(loss_sum)
        self._skipped = 0 if updated else self._skipped + 1
        if self._skipped == _MOST_SKIPPED:
            raise UserError(
                f"the gradient was not finite in {_MOST_SKIPPED} steps one after another (last: step {self.step}); "
                f"{_DIVERGED}"
            )

    def _commit(self) -> None:
        writer.commit(
            self.folder.checkpoints,
            self.step,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=state.optimizer_tensors(self.optimizer, self.model),
            trainer={
                "step": self.step,
                "total_trained_tokens": self.total_trained_tokens,
                "scaler": self.scaler.state_dict(),
                "plan": self.plan.state_dict(),
                "caps": self.caps,
                "ledger": self.ledger.state_dict(),
                "auto": self.auto.state_dict() if self.auto else None,
                "optimizer_groups": state.group_numbers(self.optimizer),
            },
            facts={"world_size": self.topology.size, "store_fingerprint": self.store.fingerprint},
            keep=self.config.checkpoint.keep,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True  # agreed on by all ranks at the end of the step
        if number == signal.SIGINT:  # a second Ctrl-C stops at once
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
