"""Pretrained models: what may be asked of them, and more positions than they were trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hvd_novel.config import ComputeConfig, ModelConfig
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model import build


@pytest.fixture
def pretrained(store: Path, tmp_path: Path) -> Path:
    """A model trained on 64 positions, with the store's tokenizer."""
    tokenizer = TokenStore.open(store).load_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    return tmp_path / "short"


def _build(folder: Path, store: Path, max_len: int, *, stretch: bool) -> torch.nn.Module:
    return build.build(
        ModelConfig(pretrained=str(folder)),
        TokenStore.open(store).load_tokenizer(),
        compute=ComputeConfig(device="cpu"),
        device=torch.device("cpu"),
        attention="sdpa",
        max_len=max_len,
        stretch=stretch,
    )


def test_positions_are_stretched_to_the_longest_sample(pretrained: Path, store: Path, tmp_path: Path) -> None:
    model = _build(pretrained, store, 256, stretch=True)
    model.save_pretrained(tmp_path / "long")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "long")
    for config in (model.config, kept.config):
        assert config.max_position_embeddings == 256
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["factor"] == 4.0
    plain = AutoModelForCausalLM.from_pretrained(pretrained)
    assert torch.equal(kept.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert kept.model.rotary_emb.inv_freq[-1] < plain.model.rotary_emb.inv_freq[-1] / 3, "slow waves are stretched"
    assert torch.equal(kept.model.rotary_emb.inv_freq[:1], plain.model.rotary_emb.inv_freq[:1]), "fast ones are not"


def test_positions_that_suffice_stay_as_they_are(pretrained: Path, store: Path) -> None:
    assert _build(pretrained, store, 64, stretch=True).config.rope_parameters["rope_type"] == "default"


def test_too_few_positions_are_refused(pretrained: Path, store: Path) -> None:
    with pytest.raises(UserError, match="positions for 64 tokens but the store's longest sample has 256"):
        _build(pretrained, store, 256, stretch=False)


def test_a_pretrained_model_takes_no_other_keys() -> None:
    section = {"pretrained": "somewhere", "hidden_size": 64}
    assert build.architecture_problems(section) == [("hidden_size", "comes from model.pretrained; leave it out")]
