"""Causal attention over packed documents, registered with transformers under one name per backend.

A pack holds documents one behind another in a batch of one row; ``cu_seq_lens_q`` (int32, documents + 1) says
where each begins. No backend ever builds a mask over the whole pack.

| backend      | kernel                                       | where                          |
|--------------|----------------------------------------------|--------------------------------|
| flash        | flash-attn ``flash_attn_varlen_func``        | CUDA, fp16 and bf16            |
| torch-varlen | ``torch.nn.attention.varlen.varlen_attn``    | CUDA, fp16 and bf16            |
| sdpa         | ``scaled_dot_product_attention`` a document  | everywhere, any dtype; exact   |
"""

from __future__ import annotations

import importlib.util
import inspect
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hvd_novel.errors import UserError

IMPLEMENTATION = {name: f"hvd_novel_{name}" for name in ("flash", "torch-varlen", "sdpa")}


def choose(name: str, device: torch.device, precision: str) -> tuple[str, str]:
    """The backend to use for the configured `name` and the reason, for the log.

    Raises UserError if a backend was asked for by name and cannot run here.
    """
    faults = {backend: _fault(backend, device, precision) for backend in IMPLEMENTATION}
    if name != "auto":
        if faults[name]:
            raise UserError(f"compute.attention={name} cannot be used: {faults[name]}; use compute.attention=auto")
        return name, "asked for"
    chosen = next(backend for backend, fault in faults.items() if not fault)
    return chosen, "; ".join(f"no {b}: {f}" for b, f in faults.items() if f and b != chosen) or "fastest here"


def _fault(backend: str, device: torch.device, precision: str) -> str:
    """Why `backend` cannot run here; empty if it can."""
    if backend == "sdpa":
        return ""
    if device.type != "cuda":
        return "the device is a CPU"
    if precision not in ("fp16", "bf16"):
        return f"its kernels take fp16 and bf16, not {precision}"
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'hvd-novel[cuda]')"
    if backend == "torch-varlen" and not _has_windowed_varlen():
        return f"torch {torch.__version__} has no varlen attention with window_size"
    return ""


def _has_windowed_varlen() -> bool:
    """Early releases of torch's varlen attention had another signature."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def _sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Exact attention, one document at a time. Query [1, heads, tokens, dim] -> output [1, tokens, heads, dim]."""
    bounds = cu_seq_lens_q.tolist()
    outputs = []
    for start, stop in pairwise(bounds):
        window = _window_mask(stop - start, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, start:stop],
                value[:, :, start:stop],
                attn_mask=window,
                dropout_p=dropout,
                is_causal=window is None,
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, [length, length] bool; None where the plain causal mask says it all."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < sliding_window)


def _flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    from flash_attn import flash_attn_varlen_func

    output = flash_attn_varlen_func(
        _rows(query),
        _rows(key),
        _rows(value),
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_k=cu_seq_lens_q,
        max_seqlen_q=max_length_q,
        max_seqlen_k=max_length_q,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output.unsqueeze(0), None


def _torch_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise UserError("torch's varlen attention has no dropout; set attention_dropout: 0 or use flash-attn")
    output = varlen_attn(
        _rows(query),
        _rows(key),
        _rows(value),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0), None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim], without a copy."""
    return tensor[0].transpose(0, 1)


AttentionInterface.register(IMPLEMENTATION["flash"], _flash)
AttentionInterface.register(IMPLEMENTATION["torch-varlen"], _torch_varlen)
AttentionInterface.register(IMPLEMENTATION["sdpa"], _sdpa)
