"""From the model section of the configuration to a checked causal language model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
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

# Progress bars of loading and saving, and advice: noise between the lines of a run.
logging.disable_progress_bar()
logging.set_verbosity_error()

# For each of these a test shows that packed documents give the logits of plain transformers one by one, that the
# logits are the output layer's, and that no token sees a later one. Others may ignore cu_seqlens, scale or cap their
# logits, look both ways or route to experts: they would train without any error, and wrongly.
ARCHITECTURES = (
    *("apertus", "arcee", "cwm", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "olmo", "olmo2", "olmo3", "opt", "persimmon"),
    *("phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)

# Set from the token store and the compute section, so not to be given by hand.
_OURS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "use_cache"}
# Older names that transformers still folds into rope_parameters.
_ROPE_NAMES = {"rope_theta", "rope_scaling"}


def architecture_problems(section: Any) -> list[tuple[str, str]]:
    """What is wrong with a raw model section, as (key, problem) pairs; empty if it describes a model."""
    if not isinstance(section, dict):
        return []
    if "pretrained" in section and "type" not in section:
        return [(key, "comes from model.pretrained; leave it out") for key in section if key != "pretrained"]
    if not isinstance(section.get("type"), str):
        return []
    name = section["type"]
    keys = {key: value for key, value in section.items() if key not in ("type", "pretrained")}
    if name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES)
        return [("type", f"'{name}' is not among the architectures known to train right; {hint}")]
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
        AutoConfig.for_model(name, **keys)
    except Exception as error:  # transformers raises classes of its own for ill-typed and contradictory values
        return [("type", " ".join(str(error).split()))]
    return []


def build(
    section: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    compute: ComputeConfig,
    device: torch.device,
    attention: str,
    max_len: int,
    stretch: bool = False,
    checkpoint: Path | None = None,
) -> PreTrainedModel:
    """A model on `device` with master weights in fp32, in training mode.

    `attention` is a backend of `model.attention`; `max_len` is the longest sample in tokens; weights come from
    `checkpoint` if there is one. A new model draws them from torch's global generator. With `stretch`, a pretrained
    model that knows fewer positions than `max_len` gets its rotary embedding scaled to them. Raises UserError for a
    pretrained folder that cannot be used.
    """
    implementation = IMPLEMENTATION[attention]
    if checkpoint is not None:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, attn_implementation=implementation, dtype=torch.float32
        )
    elif section.pretrained is not None:
        model = _pretrained(Path(section.pretrained), tokenizer, implementation, max_len if stretch else 0)
    else:
        config = _new_config(section, tokenizer, max_len)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    _check_positions(model.config, max_len)
    model.config.use_cache = False
    model.to(device)
    if compute.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def skeleton(
    section: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, max_len: int, stretch: bool = False
) -> PreTrainedModel:
    """The model that `build` makes, without weights: its parameters have shapes and no values.

    Raises UserError for a pretrained folder that holds no configuration.
    """
    if section.pretrained is None:
        config = _new_config(section, tokenizer, max_len)
    else:
        try:
            config = AutoConfig.from_pretrained(section.pretrained)
        except (OSError, ValueError, KeyError) as error:
            raise _no_model(section.pretrained, error) from None
        _check_architecture(config, section.pretrained)
        _stretch(config, max_len if stretch else 0)
        config.vocab_size = max(config.vocab_size, len(tokenizer))
    _check_positions(config, max_len)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


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


def pack_inputs(ids: torch.Tensor, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Model inputs for documents of `lengths` packed in `ids` [tokens]: positions restart at each document."""
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": ids.to(device, torch.int64, non_blocking=True)[None],
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


def logits(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of documents of `lengths` packed in `ids` [tokens], as training computes them."""
    return head(model)(hidden_states(model, pack_inputs(ids, lengths, model.device)))


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _new_config(section: ModelConfig, tokenizer: PreTrainedTokenizerBase, max_len: int) -> PreTrainedConfig:
    assert section.type is not None
    keys = {"max_position_embeddings": max(max_len, 2048), **section.architecture}
    return AutoConfig.for_model(section.type, **keys, **_token_ids(tokenizer))


def _no_model(folder: str | Path, error: Exception) -> UserError:
    reason = str(error).splitlines()[0]
    return UserError(f"model.pretrained={folder} does not hold a model with its tokenizer: {reason}")


def _pretrained(
    folder: Path, tokenizer: PreTrainedTokenizerBase, implementation: str, positions: int
) -> PreTrainedModel:
    try:
        own_tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        _stretch(config, positions)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation=implementation, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        raise _no_model(folder, error) from None
    _check_architecture(model.config, folder)
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


def _stretch(config: PreTrainedConfig, positions: int) -> None:
    """Scale plain rotary embeddings from the positions that were trained to `positions`, if these are more.

    Peng et al. 2023, "YaRN: efficient context window extension of large language models".
    """
    known = getattr(config, "max_position_embeddings", positions)
    rope = getattr(config, "rope_parameters", None) or {}
    if known < positions and rope.get("rope_type") == "default":
        factor = positions / known
        config.rope_parameters = rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": known,
        }
        config.max_position_embeddings = positions


def _check_architecture(config: PreTrainedConfig, folder: str | Path) -> None:
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"model.pretrained={folder} is a '{config.model_type}', which is not among the architectures known "
            f"to train right: {', '.join(ARCHITECTURES)}"
        )


def _check_positions(config: PreTrainedConfig, max_len: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < max_len:
        raise UserError(
            f"the model has positions for {limit} tokens but the store's longest sample has {max_len}; "
            f"set model.max_position_embeddings={max_len} (a pretrained model: curriculum.enabled=true stretches it), "
            f"or prepare with --max-len {limit}"
        )


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise UserError(
            f"the weights in {folder} are not all finite: the training had diverged; "
            "use an earlier checkpoint, and train with a lower optimizer.lr"
        )
