"""The configuration: strict, with all problems at once and a hint for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_novel.config import Config, dump
from hvd_novel.errors import UserError
from hvd_novel.train.run import load_config

MINIMAL = """\
run: {dir: runs/a}
data: {store: store}
model: {type: llama, hidden_size: 64, num_attention_heads: 4}
schedule:
  steps: 100
  warmup_steps: 10
"""
DETERMINISTIC = MINIMAL.replace("dir: runs/a", "dir: runs/a, deterministic: true")


def read(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, list(overrides))


def test_defaults_file_and_overrides_in_that_order(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL + "optimizer: {lr: 0.002}\n", "optimizer.eps=1e-6", "schedule.steps=50")
    assert config.optimizer.lr == 0.002
    assert config.optimizer.eps == 1e-6
    assert config.schedule.steps == 50
    assert config.batch.tokens == 16384


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1E3", 1000.0), ("-.5", -0.5), ("3", 3), ("1e+2", 100.0), ("0.1", 0.1)]
)
def test_numbers_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert read(tmp_path, MINIMAL, f"optimizer.lr={text.lstrip('-')}").optimizer.lr == abs(value)


def test_integers_stay_integers(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL, "schedule.steps=200", "run.seed=0")
    assert type(config.schedule.steps) is int
    assert config.run.seed == 0


def test_all_problems_are_reported_at_once_with_place_and_hint(tmp_path: Path) -> None:
    text = MINIMAL + "optimzer: {lr: 1}\nbatch:\n  tokens: many\n  micro_batch_token: 5\n"
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, "compute.presicion=bf16", "model.hiden_size=8")
    message = str(caught.value)
    path = tmp_path / "run.yaml"
    assert f"{path}:7: optimzer: unknown key; did you mean 'optimizer'?" in message
    assert f"{path}:9: batch.tokens: " in message
    assert "'many'" in message
    assert f"{path}:10: batch.micro_batch_token: unknown key; did you mean 'micro_batch_tokens'?" in message
    assert "command line (compute.presicion=bf16): compute.presicion: unknown key; did you mean 'precision'?" in message
    assert "model.hiden_size: 'llama' has no such key; did you mean 'hidden_size'?" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("run: {dir: a}\nrun: {dir: b}\n", "given twice"),
        ("run: [\n", "not valid YAML"),
        ("- 1\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("run: {dir: a}\n", "schedule: missing"),
        (MINIMAL.replace("type: llama", "type: lama"), "did you mean 'llama'?"),
        (MINIMAL.replace("type: llama", "type: mixtral"), "not among the architectures"),
        (MINIMAL.replace("hidden_size: 64", "hidden_size: big"), "expected int, got str"),
        (MINIMAL.replace("hidden_size: 64", "hidden_size: 66"), "multiple of the number of attention heads"),
        (MINIMAL.replace("hidden_size: 64", "vocab_size: 66"), "set by the token store"),
        (MINIMAL.replace("type: llama", "type: llama, pretrained: x"), "either 'type'"),
        (MINIMAL.replace("warmup_steps: 10", "warmup_steps: 100"), "must be smaller than steps"),
        (MINIMAL + "optimizer: {lr: '0.1'}\n", "optimizer.lr"),
        (MINIMAL + "sample: {genre: fantsy}\n", "no genre 'fantsy'; did you mean 'fantasy'?"),
        ("? [1, 2]\n: 3\n", "a key must be a plain name"),
        ("run: &r {dir: a, self: *r}\n", "not valid YAML"),
        (MINIMAL + "run.deterministic: yes\n", "unknown key"),
        (MINIMAL + "compression: {name: topp}\n", "unknown compressor 'topp'; available: bf16, fp16"),
        (MINIMAL + "compression: {name: topk, densty: 0.1}\n", "densty"),
        (MINIMAL + "compression: {name: topk, density: 2.0}\n", "density"),
        (MINIMAL + "compression: {name: auto, density: 0.1}\n", "compression.density: auto takes no option but"),
        (MINIMAL + "compression: {name: auto, warm_up: int8}\n", "warm_up goes with a compressor that begins later"),
        (MINIMAL + "compression: {name: onebit, warm_up: topk}\n", "compression.warm_up"),
        (MINIMAL + "compression: {name: auto, recheck_every: -1}\n", "compression.recheck_every"),
        (MINIMAL + "compression: {name: int8, recheck_every: 5}\n", "recheck_every goes with the name auto, not int8"),
        (MINIMAL + "compression: {name: auto}\noptimizer: {name: topk-adam}\n", "compressors for adamw, and optimizer"),
        (DETERMINISTIC + "compression: {name: auto}\n", "run.yaml: compression.name=auto depends on measured times"),
        (MINIMAL + "batch: {micro_batch_tokens: all}\n", "batch.micro_batch_tokens: should be a number of tokens"),
        (MINIMAL + "batch: {micro_batch_tokens: -8}\n", "greater than 0, or auto (got -8)"),
        (MINIMAL.replace("store: store", "store: store, loader_cores: []"), "data.loader_cores"),
        (MINIMAL.replace("store: store", "store: store, loader_cores: [-1]"), "data.loader_cores"),
        (DETERMINISTIC + "sharding: {steal: true}\n", "run.yaml: sharding.steal deals packs by the speed of ranks"),
        (DETERMINISTIC + "batch: {micro_batch_tokens: auto}\n", "run.yaml: batch.micro_batch_tokens=auto depends on"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UserError, match="run.yaml") as caught:
        read(tmp_path, text)
    assert part in str(caught.value)


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "run.=3", "schedule.steps.more=3", "optimizer.lr=[1"])
def test_malformed_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="override"):
        read(tmp_path, MINIMAL, override)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.yaml does not exist"):
        load_config(tmp_path / "absent.yaml", [])


@pytest.mark.parametrize("compression", ["{name: topk, density: 0.1}", "{name: auto, recheck_every: 7}"])
def test_dump_reads_back_equal(tmp_path: Path, compression: str) -> None:
    overrides = ("optimizer.lr=1e-5", "sample.prompt=第一章", "optimizer.clip_norm=null", f"compression={compression}")
    config = read(tmp_path, MINIMAL, *overrides)
    assert read(tmp_path, dump(config)) == config


def test_folders_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read(tmp_path, MINIMAL)
    assert config.data.store == str(tmp_path / "store")
    assert config.run.dir == str(tmp_path / "runs" / "a")
