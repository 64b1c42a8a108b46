"""Checkpoints: whole or not at all, and damage is found, named and passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hvd_novel.checkpoint import resume, state, writer
from hvd_novel.errors import UserError
from hvd_novel.model.build import load_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=50, **sizes))


def save(folder: Path, step: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, keep: int = 3) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * step)
    optimizer.step()
    writer.begin(folder, step)
    for rank in range(2):
        writer.write_rank(folder, step, rank, {"random": state.random_state(), "compression": {"rank": rank}})
    return writer.commit(
        folder,
        step,
        model=model,
        tokenizer=tokenizer,
        optimizer=state.optimizer_tensors(optimizer, model),
        trainer={"step": step},
        facts={"world_size": 2, "store_fingerprint": "abc"},
        keep=keep,
    )


@pytest.fixture
def saved(tmp_path: Path, model: PreTrainedModel, store: Path) -> Path:
    for step in (10, 20):
        save(tmp_path, step, model, load_tokenizer(store / "tokenizer"))
    return tmp_path


def test_newest_is_found_with_all_it_holds(saved: Path) -> None:
    found, faults = resume.newest(saved)
    assert found is not None
    assert (found.step, faults) == (20, [])
    assert found.facts["world_size"] == 2
    assert found.trainer() == {"step": 20}
    assert [alone["compression"] for alone in found.rank_states(1, 2)] == [{"rank": 1}]
    assert [alone["compression"] for alone in found.rank_states(0, 3)] == [{"rank": 0}, {"rank": 1}]
    assert found.rank_states(1, 2)[0]["random"]["cpu"].dtype == torch.uint8
    assert (saved / "latest").read_text() == "step-00000020\n"


def test_optimizer_tensors_come_back_bit_for_bit(saved: Path, model: PreTrainedModel) -> None:
    fresh = torch.optim.AdamW(model.parameters())
    tensors = resume.at(saved, 20).optimizer()
    state.load_optimizer_tensors(fresh, model, tensors)
    again = state.optimizer_tensors(fresh, model)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    assert float(again["lm_head.weight|step"]) == 1


def test_random_state_comes_back() -> None:
    before = state.random_state()
    drawn = torch.rand(3)
    state.set_random_state(before)
    assert torch.equal(torch.rand(3), drawn)


def test_ranks_draw_different_numbers() -> None:
    draws = []
    for rank in range(3):
        state.seed_rank(7, 0, rank)
        draws.append(float(torch.rand(())))
    assert len(set(draws)) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "ranks/rank-00001.pt", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_passed_over(saved: Path, name: str, damage: str) -> None:
    path = saved / "step-00000020" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-1])
    found, faults = resume.newest(saved)
    assert found is not None
    assert found.step == 10
    assert len(faults) == 1
    assert "step-00000020 is damaged" in faults[0]
    assert name == "MANIFEST.json" or name in faults[0]


def test_only_damaged_ones_are_an_error_that_names_them(saved: Path) -> None:
    for step in (10, 20):
        (saved / writer.name(step) / "trainer.json").unlink()
    with pytest.raises(UserError, match=r"(?s)step-00000020.*step-00000010"):
        resume.newest(saved)


def test_none_at_all_is_no_error(tmp_path: Path) -> None:
    assert resume.newest(tmp_path / "absent") == (None, [])


def test_an_absent_step_is_named(saved: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 15 .* there are: 10, 20"):
        resume.at(saved, 15)


def test_only_the_newest_are_kept(saved: Path, model: PreTrainedModel, store: Path) -> None:
    save(saved, 30, model, load_tokenizer(store / "tokenizer"), keep=2)
    assert writer.steps(saved) == [20, 30]


def test_a_failed_write_leaves_the_earlier_ones(
    saved: Path, model: PreTrainedModel, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "save_file", full)
    with pytest.raises(UserError, match="No space left on device; earlier checkpoints are untouched"):
        save(saved, 30, model, load_tokenizer(store / "tokenizer"))
    assert writer.steps(saved) == [10, 20]
    assert not list(saved.glob(".writing-*"))


def test_a_tokenizer_that_cannot_be_written(saved: Path, model: PreTrainedModel, store: Path) -> None:
    tokenizer = load_tokenizer(store / "tokenizer")
    tokenizer.save_pretrained = lambda folder: tokenizer.backend_tokenizer.save("/dev/full")
    with pytest.raises(UserError, match="No space left on device .*; earlier checkpoints are untouched"):
        save(saved, 30, model, tokenizer)
    assert writer.steps(saved) == [10, 20]


def test_damaged_ones_make_no_good_one_go(saved: Path, model: PreTrainedModel, store: Path) -> None:
    (saved / "step-00000020" / "trainer.json").unlink()
    (saved / "step-backup01").mkdir()
    writer.set_aside_after(saved, 10)
    save(saved, 11, model, load_tokenizer(store / "tokenizer"), keep=1)
    assert writer.steps(saved) == [11]
    assert (saved / "step-00000020.damaged").is_dir()
    assert (saved / "step-backup01").is_dir()


def test_what_a_killed_writer_left_is_removed_and_never_read(saved: Path) -> None:
    (saved / "step-00000020").rename(saved / ".writing-step-00000020")
    found, _ = resume.newest(saved)
    assert found is not None
    assert found.step == 10
    writer.remove_unfinished(saved)
    assert not list(saved.glob(".writing-*"))
