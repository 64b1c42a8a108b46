"""Packs without padding against batches padded to their longest sample, on real training steps of a small model.

Both train the same documents, cut at the same length, one after the other. Lengths are a quarter of those of
`bench.lengths`, and so is the width of the model a quarter of 768: attention then has the share of the work that it
has in a model of width 768 at the whole lengths.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hvd_novel.bench.lengths import Draw, lognormal
from hvd_novel.model import attention, build
from hvd_novel.model.loss import IGNORE, cross_entropy_sum
from hvd_novel.sharding.forecast import padded
from hvd_novel.sharding.packer import pack

_SCALE = 8
_CAP = 8192 // _SCALE
_VOCABULARY, _LOSS_CHUNK = 512, 1024
EVEN: Draw = partial(lognormal, median=2000, sigma=0.35, shortest=300, longest=12_000)
"""Lengths that vary little: where the articles measured."""


def measure(draws: dict[str, Draw], *, rounds: int) -> list[dict[str, Any]]:
    """A row for each source of lengths, over `rounds` times two batches of as many documents as fill a pack.

    On one thread. ``lengths``, ``variation`` (standard deviation / mean), ``batch`` (documents), ``padding`` (share of
    padded batches), ``clock`` and ``processor``: packed / padded tokens a second, median of rounds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_compare(name, draw, rounds) for name, draw in draws.items()]
    finally:
        torch.set_num_threads(threads)


def _compare(name: str, draw: Draw, rounds: int) -> dict[str, Any]:
    lengths = draw(100_000) // _SCALE
    lengths = np.concatenate([np.full((lengths // _CAP).sum(), _CAP), lengths % _CAP])  # cut at the cap
    lengths = np.random.default_rng(5).permutation(lengths[lengths > 1])
    batch = max(1, round(_CAP / lengths.mean()))
    packing, padding = _models()
    ratios: dict[str, list[float]] = {"clock": [], "processor": []}
    shares = []
    for number in range(rounds + 1):
        chosen = lengths[2 * batch * number :][: 2 * batch]
        documents = [torch.randint(_VOCABULARY, (length,)) for length in chosen.tolist()]
        ways = [partial(_train_packed, packing, documents), partial(_train_padded, padding, documents, batch)]
        packed, filled = _timed(ways) if number % 2 else reversed(_timed(ways[::-1]))
        if number:  # the first one warms up
            shares.append(1 - chosen.sum() / padded(chosen, batch).sum())
            for clock, how in enumerate(ratios):
                ratios[how].append(filled[clock] / packed[clock])
    return {
        "lengths": name,
        "variation": float(lengths.std() / lengths.mean()),
        "batch": batch,
        "padding": float(np.mean(shares)),
        **{how: statistics.median(found) for how, found in ratios.items()},
    }


def _models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model with attention for packs, and with that of transformers for padded batches."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=_VOCABULARY,
        hidden_size=768 // _SCALE,
        intermediate_size=2048 // _SCALE,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    packing = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION["sdpa"]).train()
    padding = copy.deepcopy(packing)
    padding.set_attn_implementation("sdpa")
    return packing, padding


def _timed(ways: Sequence[Callable[[], None]]) -> list[tuple[float, float]]:
    """(clock, processor) seconds of each."""
    seconds = []
    for way in ways:
        start = time.perf_counter(), time.process_time()
        way()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return seconds


def _train_packed(model: PreTrainedModel, documents: Sequence[torch.Tensor]) -> None:
    lengths = np.array([len(document) for document in documents], np.int32)
    for spans in pack(np.arange(len(documents)), lengths, [_CAP]).packs[0]:
        chosen = [documents[span.document] for span in spans]
        ids = torch.cat(chosen)
        inputs = build.pack_inputs(ids, [len(document) for document in chosen], model.device)
        _step(model, build.hidden_states(model, inputs), torch.cat([_labels(document) for document in chosen]))


def _train_padded(model: PreTrainedModel, documents: Sequence[torch.Tensor], batch: int) -> None:
    for first in range(0, len(documents), batch):
        ids, labels = collate_padded(documents[first : first + batch])
        # Padding stands at the end, where causal attention hides it from all that counts: no mask, the faster way.
        _step(model, model.base_model(ids).last_hidden_state.flatten(0, 1), labels.flatten())


def collate_padded(documents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, int64 [documents, longest]; padding has token 0 and no label."""
    ids = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    labels = [_labels(document) for document in documents]
    return ids, torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE)


def _labels(document: torch.Tensor) -> torch.Tensor:
    return torch.cat([document[1:], torch.tensor([IGNORE])])


def _step(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy_sum(hidden, labels, build.head(model), _LOSS_CHUNK).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-6 * parameter.grad
            parameter.grad = None


def sources(draws: dict[str, Draw]) -> dict[str, Draw]:
    """`draws`, and lengths that vary little."""
    return {"even": EVEN, **draws}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `measure`."""
    printed = Table(title="training without padding / with padding, tokens a second")
    for column in ("lengths", "variation", "batch", "padding", "by the clock", "by processor time"):
        printed.add_column(column, justify="left" if column == "lengths" else "right")
    for row in rows:
        ratios = (f"{row[how]:.2f}" for how in ("clock", "processor"))
        printed.add_row(row["lengths"], f"{row['variation']:.2f}", str(row["batch"]), f"{row['padding']:.0%}", *ratios)
    return printed
