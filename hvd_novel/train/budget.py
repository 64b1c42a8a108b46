"""Packs as large as memory allows: found by trial at the start, lowered when a step meets its limit all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from hvd_novel import comm
from hvd_novel.checkpoint import state
from hvd_novel.config import ComputeConfig
from hvd_novel.errors import UserError
from hvd_novel.sharding.packing import Pack
from hvd_novel.sharding.spans import Span
from hvd_novel.train import memory
from hvd_novel.train.step import pack_loss

T = TypeVar("T")

_MARGIN = 0.9  # of what was found to fit: real packs and other processes differ from those of the trial
_SMALLER = 0.75  # of a pack that did not fit
# Copies of the parameters that a step needs besides weights and gradients: AdamW's two moments, and in the exchange
# what is sent and what comes back.
_COPIES = 4


class MemoryBudget:
    """The most tokens in a pack of this rank: `cap`, and never less than `longest`, the longest document."""

    def __init__(self, model: PreTrainedModel, cap: int, longest: int) -> None:
        self.cap = cap
        self.changed = False
        """Whether a step lowered it since this was last set to False."""
        self._model, self._longest = model, longest
        self._limit = cap  # of the step under way; documents shorter than the longest let it fall lower
        self._tried: Pack | None = None
        self._fault = ""

    def run(self, accumulate: Callable[[Iterable[Pack]], T], packs: Iterable[Pack]) -> T:
        """The result of `accumulate`, which adds up gradients of `packs` and must not exchange them.

        If memory does not suffice, its gradients are thrown away and it begins anew with the same documents in
        smaller packs: the sum is the same. If a single document does not fit, it gets no packs, so that other ranks
        do not wait for this one, and `check` tells.
        """
        taken: list[Pack] = []
        rest = iter(packs)
        self._limit = self.cap
        while True:
            try:
                return accumulate(self._pieces(taken, rest))
            except (MemoryError, RuntimeError) as error:
                if not memory.is_out_of_memory(error):
                    raise
            # Here, as the handler holds on to the tensors of what failed.
            for parameter in self._model.parameters():
                parameter.grad = None
            memory.give_back(self._model.device)
            if not self._lower():
                return accumulate([])

    def check(self) -> None:
        """Raise UserError if a step could not be computed."""
        if self._fault:
            raise UserError(self._fault)

    def _pieces(self, taken: list[Pack], rest: Iterator[Pack]) -> Iterator[Pack]:
        for pack in list(taken):
            yield from self._fitting(pack)
        for pack in rest:
            taken.append(pack)
            yield from self._fitting(pack)

    def _fitting(self, pack: Pack) -> Iterator[Pack]:
        for piece in pack.split(self._limit):
            self._tried = piece
            yield piece

    def _lower(self) -> bool:
        """Make packs smaller than the one that failed; False if it cannot be divided."""
        assert self._tried is not None
        self.changed = True
        tokens = len(self._tried.input_ids)
        if len(self._tried.lengths) == 1:
            self._fault = _too_long(tokens, self._model.device)
            return False
        self._limit = int(tokens * _SMALLER)
        self.cap = max(self._longest, min(self.cap, self._limit))
        return True


def agree(cap: int, *, alike: bool) -> list[int]:
    """The caps of all replicas; all equal to the smallest if `alike`, as any of them may get any pack."""
    caps = comm.all_gather_object(cap, "train.caps")
    return [min(caps)] * len(caps) if alike else caps


def largest_pack(model: PreTrainedModel, compute: ComputeConfig, *, longest: int, most: int, shared_by: int) -> int:
    """Tokens, from `longest` to `most`, of the largest pack of documents of at most `longest` that can be trained.

    Runs `model` forward and backward on packs that double until one does not fit; parameters, gradients and random
    numbers stay as they were. To be called before the optimizer has made its state. `shared_by`: ranks that try on this
    machine at the same time. Raises UserError if the longest document alone does not fit.
    """
    trial = _Trial(model, compute, longest, shared_by)
    random = state.random_state()
    try:
        if not trial.fits(longest):
            raise UserError(_too_long(longest, model.device))
        return _search(trial.fits, longest, max(longest, most))
    finally:
        state.set_random_state(random)
        memory.give_back(model.device)


def _search(fits: Callable[[int], bool], smallest: int, largest: int) -> int:
    """`largest` if it fits, else nine tenths of what does, to an eighth. `smallest` is known to fit."""
    good, bad = smallest, 0
    while good < largest and not bad:
        size = min(2 * good, largest)
        good, bad = (size, 0) if fits(size) else (good, size)
    while bad - good > max(1, good // 8):
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size) else (good, size)
    return max(smallest, int(_MARGIN * good)) if bad else good


class _Trial:
    """Forward and backward passes of packs of the worst shape: the longest documents, every label trained."""

    def __init__(self, model: PreTrainedModel, compute: ComputeConfig, longest: int, shared_by: int) -> None:
        self._model, self._compute, self._longest = model, compute, longest
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)
        self._reserved = _COPIES * weights
        self._gradients = weights
        self._measured = model.device.type == "cpu"
        self._before = memory.resident_bytes()
        self._room = _MARGIN * memory.available_bytes() / shared_by - self._reserved - self._gradients
        self._needed = 0.0  # bytes a token in the last trial

    def fits(self, tokens: int) -> bool:
        """Whether a pack of `tokens` can be trained; on a CPU, once one was tried, the peak is foretold."""
        if self._measured and self._needed and tokens * self._needed > self._room:
            return False
        try:
            self._run(tokens)
        except (MemoryError, RuntimeError) as error:
            if not memory.is_out_of_memory(error):
                raise
            fit = False
        else:
            fit = True
        memory.give_back(self._model.device)
        return fit

    def _run(self, tokens: int) -> None:
        model = self._model
        memory.reset_peak()
        reserved = torch.empty(self._reserved, dtype=torch.uint8, device=model.device)
        loss = pack_loss(model, self._pack(tokens), self._compute)
        # Not backward(): gradients stay out of the parameters, and hooks do not run.
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        del reserved, gradients
        grown = memory.peak_bytes() - self._before - self._gradients
        self._needed = grown / tokens

    def _pack(self, tokens: int) -> Pack:
        lengths = [self._longest] * (tokens // self._longest)
        if rest := tokens % self._longest:
            lengths.append(rest)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        ids = torch.arange(tokens) % vocabulary
        return Pack(input_ids=ids, labels=ids, spans=[Span(0, 0, length) for length in lengths])


def _too_long(tokens: int, device: torch.device) -> str:
    return (
        f"batch.micro_batch_tokens=auto: a sample of {tokens} tokens does not fit into the memory of {device} by "
        "itself; set compute.gradient_checkpointing=true, prepare with a smaller --max-len, or train a smaller model"
    )
