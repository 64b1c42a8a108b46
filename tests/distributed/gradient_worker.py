"""Run by every rank: a step by each compressor, without an update; rank 0 writes gradients and all ranks' packs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import compressors
from hvd_novel import comm
from hvd_novel.config import ComputeConfig, ModelConfig
from hvd_novel.corpus.store import TokenStore
from hvd_novel.model import build
from hvd_novel.sharding.packing import packs_of
from hvd_novel.sharding.spans import Span
from hvd_novel.train.step import train_step

store, out = TokenStore.open(Path(sys.argv[1])), Path(sys.argv[2])
topology = comm.init(deterministic=False)
torch.set_num_threads(1)
compute = ComputeConfig(device="cpu")
section = ModelConfig.model_validate(
    {"type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
)
# Twelve packs of one document each, dealt unevenly: rank 0 takes one, the last of four none, the rest is shared.
split = store.split("train")
documents = [[Span(document, 0, int(split.lengths[document]))] for document in range(12)]
shares = {
    1: [documents],
    2: [documents[:1], documents[1:]],
    3: [documents[:1], documents[1:4], documents[4:]],
    4: [documents[:1], documents[1:4], documents[4:], []],
}[topology.size]
trained = int(split.trained_tokens[:12].sum())
for compression in sys.argv[3:]:
    torch.manual_seed(0)
    model = build.build(
        section, store.load_tokenizer(), compute=compute, device=torch.device("cpu"), attention="sdpa", max_len=256
    )
    comm.broadcast_parameters(model)
    optimizer = comm.distributed(
        compressors.DistributedOptimizer,
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        compression=compressors.get(compression),
    )
    train_step(
        model,
        optimizer,
        torch.amp.GradScaler("cpu", enabled=False),
        packs_of(split, shares[topology.replica]),
        trained_tokens=trained,
        compute=compute,
        clip_norm=None,
    )
    if topology.rank == 0:
        tensors = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        packs = torch.tensor([len(share) for share in shares])
        save_file(tensors | {"packs": packs}, out.with_suffix(f".{compression}"))
comm.leave(0)
