"""A small model on all ranks, for benchmarks of steps; nothing is learned, the learning rate is 0."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import compressors
from hvd_novel import comm
from hvd_novel.config import ComputeConfig, ModelConfig
from hvd_novel.corpus.store import TokenStore
from hvd_novel.model import build

COMPUTE = ComputeConfig(device="cpu")


def small_model(store: TokenStore, width: int) -> tuple[PreTrainedModel, Any]:
    """A llama of two layers for `store`, on one CPU thread, and its distributed optimizer; after `comm.init`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    section = ModelConfig.model_validate(
        {
            "type": "llama",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
    )
    model = build.build(
        section,
        store.load_tokenizer(),
        compute=COMPUTE,
        device=torch.device("cpu"),
        attention="sdpa",
        max_len=store.header["max_len"],
    )
    comm.broadcast_parameters(model)
    optimizer = comm.distributed(
        compressors.DistributedOptimizer,
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
    )
    return model, optimizer
