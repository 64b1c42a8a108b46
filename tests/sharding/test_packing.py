"""Packs: labels shifted inside a sample, masked at its end and for context, every token trained once.

The mutants at the end break what packs promise, one thing at a time, and show that the oracles see it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hvd_novel.corpus.store import StoreSplit, TokenStore
from hvd_novel.model import attention, build
from hvd_novel.model.loss import IGNORE, cross_entropy_sum
from hvd_novel.sharding.packing import Pack, collate, packs_of
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.spans import Span
from tests.conftest import MODEL


@pytest.fixture(scope="module")
def split(store: Path) -> StoreSplit:
    return TokenStore.open(store).split("train")


def whole(split: StoreSplit, document: int) -> Span:
    return Span(document, 0, int(split.lengths[document]))


def windows(split: StoreSplit) -> list[int]:
    """Samples that begin with context."""
    found = [d for d in range(len(split)) if split.context[d] > 1]
    assert found, "the store was meant to hold windows with context"
    return found


def test_labels_are_the_next_token_or_none(split: StoreSplit) -> None:
    documents = [0, windows(split)[0], 1]
    pack = collate(split, [whole(split, document) for document in documents])
    start = 0
    for document, length in zip(documents, pack.lengths, strict=True):
        ids, labels = pack.input_ids[start : start + length], pack.labels[start : start + length]
        context = int(split.context[document])
        assert torch.equal(ids, torch.from_numpy(split.input_ids(document).astype(np.int64)))
        assert labels[: context - 1].eq(IGNORE).all()
        assert torch.equal(labels[context - 1 : -1], ids[context:])
        assert labels[-1] == IGNORE, "the last token of a document must not predict the first of the next"
        start += length
    assert start == len(pack.input_ids)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 100])
def test_a_sample_cut_into_pieces_has_the_labels_of_the_whole(split: StoreSplit, chunk: int) -> None:
    """The last position of a piece predicts the first token of the next: no label is lost at a cut."""
    document = windows(split)[0]
    length = int(split.lengths[document])
    pieces = [Span(document, start, min(start + chunk, length)) for start in range(0, length, chunk)]
    pack, uncut = collate(split, pieces), collate(split, [whole(split, document)])
    assert torch.equal(pack.input_ids, uncut.input_ids)
    assert torch.equal(pack.labels, uncut.labels)
    positions = pack.model_inputs(torch.device("cpu"))["position_ids"][0]
    assert positions.tolist() == [position % chunk for position in range(length)]


@pytest.mark.parametrize("cap", [700, 61])
def test_an_epoch_trains_every_token_of_the_corpus_once(store: Path, cap: int) -> None:
    """Closes the account from the header's corpus tokens to the labels that reach the loss, with and without cuts."""
    opened = TokenStore.open(store)
    split = opened.split("train")
    plan = Plan(split.lengths, split.column("context"), seed=1, step_tokens=3000)
    total = 0
    spans: dict[int, list[tuple[int, int]]] = {}
    table = split.columns()
    for step in range(plan.steps_per_epoch):
        planned = plan.step(step, [cap, cap + 100])
        labels = [pack.labels for packs in planned.packs for pack in packs_of(split, packs)]
        assert sum(int((label != IGNORE).sum()) for label in labels) == planned.trained_tokens
        assert sum(len(label) for label in labels) == planned.tokens
        total += planned.trained_tokens
        for document in planned.documents.tolist():
            novel = table["novel"][document].as_py()
            spans.setdefault(novel, []).append(
                (table["token_start"][document].as_py(), table["token_end"][document].as_py())
            )
    assert total == opened.header["counts"]["train"]["trained_tokens"]
    for pieces in spans.values():
        ordered = sorted(pieces)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), "no token twice"


def test_model_inputs_of_a_pack(split: StoreSplit) -> None:
    pack = collate(split, [whole(split, 0), Span(1, 3, 20), Span(2, 0, 1)])
    check_inputs(pack)


@pytest.mark.parametrize("spans", [[], [Span(0, 5, 5)], [Span(0, 0, 3), Span(1, 4, 2)]])
def test_packs_of_nothing_are_refused(split: StoreSplit, spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="a pack needs spans"):
        collate(split, spans)


# The oracles, and mutants that each of them must catch.


def check_inputs(pack: Pack) -> None:
    """int32 cu_seqlens from 0, strictly rising, to the number of tokens; positions restart at each of them."""
    inputs = pack.model_inputs(torch.device("cpu"))
    ends = inputs["cu_seq_lens_q"]
    assert ends.dtype == torch.int32
    assert torch.equal(ends, inputs["cu_seq_lens_k"])
    assert ends.tolist() == [0, *np.cumsum(pack.lengths)]
    assert (ends.diff() > 0).all()
    assert inputs["max_length_q"] == inputs["max_length_k"] == int(ends.diff().max())
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, len(pack.input_ids))
    assert inputs["position_ids"][0].tolist() == [p for length in pack.lengths for p in range(length)]


@pytest.fixture(scope="module")
def model(store: Path) -> PreTrainedModel:
    sizes = {key: value for key, value in MODEL.items() if key != "type"}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=len(TokenStore.open(store).load_tokenizer()), **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION["sdpa"]).eval()


def gradient(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def packed_gradient(model: PreTrainedModel, pack: Pack, divisor: int) -> torch.Tensor:
    hidden = build.hidden_states(model, pack.model_inputs(model.device))
    return gradient(model, cross_entropy_sum(hidden, pack.labels, build.head(model), 64) / divisor)


def reference_gradient(model: PreTrainedModel, split: StoreSplit, spans: list[Span]) -> torch.Tensor:
    """Plain transformers on one span at a time, labels straight from the stored sample."""
    losses, trained = [], 0
    model.set_attn_implementation("sdpa")
    for document, start, stop in spans:
        tokens = torch.from_numpy(split.input_ids(document).astype(np.int64))
        predicted = [p for p in range(start + 1, min(stop + 1, len(tokens))) if p >= int(split.context[document])]
        logits = model(tokens[None, start:stop]).logits[0]
        losses.append(cross_entropy(logits[[p - 1 - start for p in predicted]], tokens[predicted], reduction="sum"))
        trained += len(predicted)
    model.set_attn_implementation(attention.IMPLEMENTATION["sdpa"])
    return gradient(model, torch.stack(losses).sum() / trained)


def oracle_spans(split: StoreSplit) -> list[Span]:
    window = windows(split)[0]
    cut = int(split.context[window]) + 9
    return [whole(split, 0), Span(window, 0, cut), Span(window, cut, int(split.lengths[window])), whole(split, 3)]


def difference(model: PreTrainedModel, split: StoreSplit, divisor: int | None = None) -> float:
    """Relative distance of the packed gradient from that of spans one by one."""
    pack = collate(split, oracle_spans(split))
    trained = int((pack.labels != IGNORE).sum())
    expected = reference_gradient(model, split, oracle_spans(split))
    return float((packed_gradient(model, pack, divisor or trained) - expected).norm() / expected.norm())


TOLERANCE = 1e-5


def test_packed_gradient_equals_that_of_spans_one_by_one(model: PreTrainedModel, split: StoreSplit) -> None:
    assert difference(model, split) < TOLERANCE


def test_mutant_attention_across_documents_is_caught(
    model: PreTrainedModel, split: StoreSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_document(self: Pack, device: torch.device) -> dict[str, object]:
        inputs = build.pack_inputs(self.input_ids, self.lengths, device)
        whole_pack = build.pack_inputs(self.input_ids, [len(self.input_ids)], device)
        return {**whole_pack, "position_ids": inputs["position_ids"]}

    monkeypatch.setattr(Pack, "model_inputs", one_document)
    assert difference(model, split) > 100 * TOLERANCE
    with pytest.raises(AssertionError):
        check_inputs(collate(split, oracle_spans(split)))


def test_mutant_labels_across_documents_are_caught(
    model: PreTrainedModel, split: StoreSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Pack.__init__

    def crossing(self: Pack, input_ids: torch.Tensor, labels: torch.Tensor, spans: list[Span]) -> None:
        crossed = torch.cat([input_ids[1:], torch.tensor([IGNORE])])
        original(self, input_ids, torch.where(labels == IGNORE, crossed, labels), spans)

    monkeypatch.setattr(Pack, "__init__", crossing)
    assert difference(model, split) > 100 * TOLERANCE


def test_mutant_label_lost_at_a_cut_is_caught(
    model: PreTrainedModel, split: StoreSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Pack.__init__

    def losing(self: Pack, input_ids: torch.Tensor, labels: torch.Tensor, spans: list[Span]) -> None:
        labels[np.cumsum([span.stop - span.start for span in spans]) - 1] = IGNORE
        original(self, input_ids, labels, spans)

    monkeypatch.setattr(Pack, "__init__", losing)
    assert difference(model, split) > 100 * TOLERANCE


def test_mutant_division_by_all_tokens_is_caught(model: PreTrainedModel, split: StoreSplit) -> None:
    pack = collate(split, oracle_spans(split))
    assert difference(model, split, divisor=len(pack.labels)) > 100 * TOLERANCE


def test_mutant_positions_that_go_on_are_caught(
    model: PreTrainedModel, split: StoreSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rotary positions, gradients hardly see it: the direct look at positions must."""

    def running_on(self: Pack, device: torch.device) -> dict[str, object]:
        inputs = build.pack_inputs(self.input_ids, self.lengths, device)
        return {**inputs, "position_ids": torch.arange(len(self.input_ids), device=device)[None]}

    pack = collate(split, oracle_spans(split))
    check_inputs(pack)
    monkeypatch.setattr(Pack, "model_inputs", running_on)
    assert difference(model, split) < 100 * TOLERANCE
    with pytest.raises(AssertionError):
        check_inputs(pack)
