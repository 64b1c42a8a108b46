"""Ways to train the same model: alone, with each compressor, and with what a user would take instead."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import compressors
from compressors.ledger import Ledger
from hvd_novel import comm
from hvd_novel.bench.peers import PEERS
from hvd_novel.errors import UserError
from hvd_novel.tuning.schemes import SCHEMES

COMPUTE = "compute"
"""The way that exchanges nothing."""
WAYS = (COMPUTE, *SCHEMES, *PEERS)
HEAD = 32
"""Width of an attention head."""
_LEARNING_RATE = 1e-4


def llama(width: int, layers: int, vocabulary: int) -> PreTrainedModel:
    """An untied llama in fp32 with random weights, the same on all ranks.

    Raises UserError for a width that is no multiple of `HEAD`.
    """
    if width % HEAD:
        raise UserError(f"--width {width} cannot be divided into heads of {HEAD}; choose a multiple of {HEAD}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@dataclass
class Way:
    """A model of its own that is trained in one way, by AdamW."""

    model: torch.nn.Module
    optimizer: Any
    share: float = 1.0
    """Factor of this rank's loss."""
    ledger: Ledger | None = None
    """The accounts of what Horovod sends, where it is Horovod that sends."""

    def step(self, ids: torch.Tensor) -> None:
        """Train on `ids` [1, tokens]."""
        self.optimizer.zero_grad()
        (self.loss(ids) * self.share).backward()
        self.optimizer.step()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of `ids` [1, tokens], a scalar in nats."""
        return self.model(input_ids=ids, labels=ids).loss

    def gradient(self) -> torch.Tensor:
        """The gradients of all parameters as they stand, flat."""
        return torch.cat(
            [parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None]
        )


def make(name: str, original: PreTrainedModel, bucket_bytes: int) -> Way:
    """The way called `name`, one of `WAYS`, on a copy of `original`. Collective; after `peers.join` for `PEERS`.

    `bucket_bytes`: float32 bytes of gradients that a compressor sends as one.
    """
    model = copy.deepcopy(original)
    if name in PEERS:
        model = PEERS[name](model)
    adam = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    if name not in SCHEMES:
        return Way(model, adam)
    optimizer = comm.distributed(
        compressors.DistributedOptimizer,
        adam,
        named_parameters=model.named_parameters(),
        compression=compressors.get(**SCHEMES[name]),
        bucket_bytes=bucket_bytes,
    )
    return Way(model, optimizer, 1 / comm.topology().size, optimizer.ledger)
