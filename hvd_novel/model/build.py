"""From the model section of the configuration to a checked causal language model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hvd_novel.config import ComputeConfig, ModelConfig, nearest
from hvd_novel.errors import UserError
from hvd_novel.model.attention import IMPLEMENTATION
from hvd_novel.model.loss import IGNORE, cross_entropy_sum

# Progress bars of loading and saving, and advice: noise between the lines of a run.
logging.disable_progress_bar()
logging.set_verbosity_error()

# Set from the token store and the compute section, so not to be given by hand.
_OURS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "use_cache"}
# Older names that transformers still folds into rope_parameters.
_ROPE_NAMES = {"rope_theta", "rope_scaling"}
_PACKING_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 5e-2}


def architecture_problems(section: Any) -> list[tuple[str, str]]:
    """What is wrong with a raw model section, as (key, problem) pairs; empty if it describes a model."""
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return []
    name, keys = (
        section["type"],
        {key: value for key, value in section.items() if key not in ("type", "pretrained")},
    )
    causal = sorted(kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING)
    if name not in causal:
        return [("type", f"transformers has no causal language model '{name}'; {nearest(name, causal)}")]
    valid = {field.name for field in dataclasses.fields(CONFIG_MAPPING[name])}
    valid |= _ROPE_NAMES if "rope_parameters" in valid else set()
    problems = [
        (key, "is set by the token store and the compute section; leave it out") for key in keys if key in _OURS
    ]
    problems += [
        (key, f"'{name}' has no such key; {nearest(key, sorted(valid))}")
        for key in keys
        if key not in valid and key not in _OURS
    ]
    if problems:
        return problems
    try:
        config = AutoConfig.for_model(name, **keys)
    except Exception as error:  # transformers raises classes of its own for ill-typed and contradictory values
        return [("type", " ".join(str(error).split()))]
    if any(hasattr(config, key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return [
            (
                "type",
                f"'{name}' is a mixture of experts, whose routing loss is not trained here; use a dense model",
            )
        ]
    return []


def build(
    section: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    compute: ComputeConfig,
    device: torch.device,
    attention: str,
    max_len: int,
    checkpoint: Path | None = None,
) -> PreTrainedModel:
    """A model on `device` with master weights in fp32, in training mode, checked for packing.

    `attention` is a backend of `model.attention`; `max_len` is the longest sample in tokens; weights come from
    `checkpoint` if there is one. A new model draws them from torch's global generator. Raises UserError for a
    pretrained folder that cannot be used.
    """
    implementation = IMPLEMENTATION[attention]
    if checkpoint is not None:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, attn_implementation=implementation, dtype=torch.float32
        )
    elif section.pretrained is not None:
        model = _pretrained(Path(section.pretrained), tokenizer, implementation)
    else:
        assert section.type is not None
        keys = {"max_position_embeddings": max(max_len, 2048), **section.architecture}
        config = AutoConfig.for_model(section.type, **keys, **_token_ids(tokenizer))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    _check_positions(model.config, max_len)
    model.config.use_cache = False
    model.to(device)
    check_packing(model, compute.precision)
    if compute.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a Hugging Face folder."""
    return AutoTokenizer.from_pretrained(folder)


def hidden_states(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """Last hidden states [tokens, width] of a pack (see `Pack.model_inputs`)."""
    return model.base_model(**batch, use_cache=False).last_hidden_state[0]


def head(model: PreTrainedModel) -> torch.nn.Module:
    """The module that maps hidden states to logits."""
    module = model.get_output_embeddings()
    assert module is not None
    return module


def check_packing(model: PreTrainedModel, precision: str) -> None:
    """Run two short documents packed and apart, and the chunked loss against the model's own logits.

    Guards against architectures that ignore ``cu_seqlens`` or change their logits after the head: both would
    train without any error. Raises UserError that names the architecture.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (9,), generator=generator)
    training = model.training
    model.eval()
    with torch.no_grad(), autocast(model.device, precision):
        apart = torch.cat([_logits(model, part, [len(part)]) for part in ids.split([5, 4])])
        packed = _logits(model, ids, [5, 4])
        labels = torch.cat([ids[1:], torch.tensor([IGNORE])]).to(model.device)
        hidden = hidden_states(model, pack_inputs(ids, [5, 4], model.device))
        chunked = cross_entropy_sum(hidden, labels, head(model), chunk_tokens=3)
        whole = torch.nn.functional.cross_entropy(packed[:-1].float(), labels[:-1], reduction="sum")
    model.train(training)
    tolerance = _PACKING_TOLERANCE[precision] * max(1.0, float(apart.abs().max()))
    if not torch.allclose(packed, apart, atol=tolerance, rtol=0):
        raise UserError(
            f"model type '{model.config.model_type}' mixes packed documents: its attention does not honour "
            "cu_seqlens; choose another architecture (llama, qwen2, qwen3, mistral, ...)"
        )
    if not torch.allclose(chunked.float(), whole, rtol=_PACKING_TOLERANCE[precision]):
        raise UserError(
            f"model type '{model.config.model_type}' changes its logits after the output layer, which the "
            "chunked loss does not do; choose another architecture (llama, qwen2, qwen3, mistral, ...)"
        )


def pack_inputs(ids: torch.Tensor, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Model inputs for documents of `lengths` packed in `ids` [tokens]: positions restart at each document."""
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": ids.to(device, torch.int64)[None],
        "position_ids": positions.to(device)[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bf16 or fp16; does nothing for fp32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _logits(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return model(**pack_inputs(ids, lengths, model.device), use_cache=False).logits[0]


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _pretrained(folder: Path, tokenizer: PreTrainedTokenizerBase, implementation: str) -> PreTrainedModel:
    try:
        own_tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.pretrained={folder} does not hold a model with its tokenizer: {reason}") from None
    theirs, ours, added = own_tokenizer.get_vocab(), tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if any(ours.get(token) != index for token, index in theirs.items()) or ours.keys() - theirs.keys() - added.keys():
        raise UserError(
            f"the token store was made with another tokenizer than the one of model.pretrained={folder}; "
            f"run: hvd-novel prepare ... --tokenizer {folder}"
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))  # the genre and chapter tokens that prepare added
    for name, index in _token_ids(tokenizer).items():
        if name != "vocab_size":
            setattr(model.config, name, index)
    return model


def _check_positions(config: PreTrainedConfig, max_len: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < max_len:
        raise UserError(
            f"the model has positions for {limit} tokens but the store's longest sample has {max_len}; "
            f"set model.max_position_embeddings={max_len} or prepare with --max-len {limit}"
        )
