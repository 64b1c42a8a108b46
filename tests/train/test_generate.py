"""Sampling: valid text whatever the model wants, repeatable, and without touching training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel.config import ComputeConfig, ModelConfig
from hvd_novel.model import build
from hvd_novel.train.generate import Sampling, ValidText, _is_prefix, _unfinished, generate
from tests.conftest import MODEL


@pytest.fixture(scope="module")
def tokenizer(store: Path) -> PreTrainedTokenizerBase:
    return build.load_tokenizer(store / "tokenizer")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(0)
    return build.build(
        ModelConfig.model_validate(MODEL),
        tokenizer,
        compute=ComputeConfig(gradient_checkpointing=True),
        device=torch.device("cpu"),
        attention="sdpa",
        max_len=256,
    )


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **changes: float) -> str:
    sampling = Sampling(**{"max_new_tokens": 60, "temperature": 1.5, "top_p": 1.0, "seed": 1, **changes})
    return generate(model, tokenizer, prompt="雨", genre="fantasy", sampling=sampling)


@pytest.mark.parametrize("seed", range(8))
def test_an_untrained_model_writes_valid_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    """Most bytes drawn at random are not UTF-8: without the mask nearly every such text holds U+FFFD."""
    text = write(model, tokenizer, seed=seed)
    assert text
    assert "\ufffd" not in text
    assert "<|" not in text


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert write(model, tokenizer, seed=5) == write(model, tokenizer, seed=5)
    assert write(model, tokenizer, seed=5) != write(model, tokenizer, seed=6)


def test_greedy_ignores_the_seed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert write(model, tokenizer, temperature=0, seed=1) == write(model, tokenizer, temperature=0, seed=2)


def test_training_is_not_touched(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    before = torch.get_rng_state(), model.config._attn_implementation
    write(model, tokenizer)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert model.config._attn_implementation == before[1]
    assert model.training
    assert model.is_activation_checkpointing


@given(st.text(max_size=6), st.integers(0, 24))
@settings(deadline=None)
def test_unfinished_is_what_a_cut_leaves_of_a_character(text: str, cut: int) -> None:
    data = text.encode("utf-8")[:cut]
    rest = _unfinished(data)
    data[: len(data) - len(rest)].decode("utf-8")  # whole up to there
    assert _is_prefix(data)
    assert not rest or _is_prefix(rest)


@pytest.mark.parametrize("data", [b"\x80", b"\xc0", b"\xe4\xb8\x41", b"\xed\xa0", b"\xf5", b"a\xff", b"\xe0\x80"])
def test_invalid_bytes_are_no_prefix(data: bytes) -> None:
    assert not _is_prefix(data)


def test_tokens_of_half_a_character_at_the_end_are_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    valid = ValidText(tokenizer, 0)
    ids = tokenizer.encode("山", add_special_tokens=False) + tokenizer.encode("𠮷", add_special_tokens=False)[:-1]
    assert tokenizer.decode(valid.whole(ids)) == "山"


def test_special_tokens_only_between_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    valid = ValidText(tokenizer, 0)
    begun = tokenizer.encode("𠮷", add_special_tokens=False)[:-1]
    scores = valid(torch.tensor([begun]), torch.zeros(1, len(tokenizer)))
    assert scores[0, tokenizer.eos_token_id] == float("-inf")
    scores = valid(torch.tensor([tokenizer.encode("山", add_special_tokens=False)]), torch.zeros(1, len(tokenizer)))
    assert scores[0, tokenizer.eos_token_id] == 0
