"""A small character model on one file of text: `train.py` as for any Horovod, `train_compressed.py` with compression.

    mpirun -np 2 python examples/horovod/train.py TEXT_FILE

The two differ in two lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import compressors

CONTEXT, BATCH, STEPS = 64, 16, 200


class Model(nn.Module):
    """The next byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.rnn = nn.GRU(128, 256, batch_first=True)
        self.head = nn.Linear(256, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [BATCH, CONTEXT] each, from random places of the text."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def main(file: Path) -> None:
    """Train and print the loss now and then."""
    hvd.init()
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(hvd.rank())  # other places on every rank
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = compressors.DistributedOptimizer(optimizer, model.named_parameters(), compressors.QSGD())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        inputs, targets = batch(text, generator)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            mean = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
