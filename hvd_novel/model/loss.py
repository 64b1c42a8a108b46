"""Cross-entropy from hidden states, in chunks, so that the logits of a whole pack never exist at once."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

IGNORE = -100


def cross_entropy_sum(
    hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Module, chunk_tokens: int
) -> torch.Tensor:
    """Sum of -log p(label) over the positions whose label is not IGNORE.

    hidden [tokens, width] floating, labels [tokens] int64 (already shifted: the label of position i is the token
    at i + 1), head maps width to the vocabulary. Returns a scalar in fp32 (fp64 for fp64 input). Logits of at
    most `chunk_tokens` positions exist at any time; the backward pass computes each chunk's again.
    """
    trained = labels != IGNORE
    hidden, labels = hidden[trained], labels[trained]
    if len(labels) == 0:
        return hidden.sum() * 0.0  # keeps the graph: every rank must reach its backward hooks
    pieces = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    losses = [checkpoint(_chunk_sum, h, y, head, use_reentrant=False, preserve_rng_state=False) for h, y in pieces]
    return torch.stack(losses).sum()


def _chunk_sum(hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    logits = head(hidden)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return cross_entropy(logits, labels, reduction="sum")
