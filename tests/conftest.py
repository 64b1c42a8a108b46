"""Fixtures: a small token store made once, and configurations for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hvd_novel.corpus.prepare import prepare

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels in Triton run on CPUs, which must be said before it is imported

ROOT = Path(__file__).parent.parent
STORIES = ROOT / "examples" / "stories"
MODEL = {
    "type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of the example stories, with samples of 32 to 256 tokens."""
    out = tmp_path_factory.mktemp("store") / "store"
    prepare(
        [STORIES],
        out,
        tokenizer=None,
        vocab_size=600,
        max_len=256,
        min_len=32,
        overlap=16,
        validation_fraction=0.05,
        seed=1,
    )
    return out


@pytest.fixture
def write_config(tmp_path: Path, store: Path) -> Callable[..., Path]:
    """Write a training configuration; keyword arguments replace keys of its sections."""

    def write(name: str = "run", **sections: dict[str, Any]) -> Path:
        tree: dict[str, Any] = {
            "run": {"dir": str(tmp_path / name), "seed": 3},
            "data": {"store": str(store)},
            "model": dict(MODEL),
            "batch": {"tokens": 1500, "micro_batch_tokens": 600},
            "optimizer": {"lr": 3e-3},
            "schedule": {"steps": 20, "warmup_steps": 4},
            "compute": {"device": "cpu", "threads": 1},
            "evaluate": {"every": 0},
            "checkpoint": {"every": 0},
            "log": {"every": 1, "tensorboard": False},
        }
        for section, values in sections.items():
            tree[section] = values if "pretrained" in values else {**tree.get(section, {}), **values}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def real_novels() -> Path:
    """The folder with real novels, or a skip."""
    folder = os.environ.get("HVD_NOVEL_TEST_CORPUS")
    if not folder:
        pytest.skip("HVD_NOVEL_TEST_CORPUS is not set: no real novels to read")
    return Path(folder)
