"""Text from a model: sampling with temperature and nucleus, always valid UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hvd_novel.corpus.tokenizer import genre_token
from hvd_novel.errors import UserError

_LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Sampling:
    """How to draw."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 takes the most likely token each time."""
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise UserError(
                f"temperature {self.temperature} is too low to divide by: 0, or at least {_LOWEST_TEMPERATURE}"
            )


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, prompt: str, genre: str, sampling: Sampling
) -> str:
    """Continue `prompt` as a text of `genre`; returns the new text alone.

    Stops at the end of a text or after `max_new_tokens`. The global random generators are left as they were, so
    that sampling during training does not change the training.
    """
    ids = _prompt_ids(tokenizer, prompt, genre)
    _check_room(model, len(ids), sampling.max_new_tokens)
    inputs = torch.tensor([ids], device=model.device)
    drawing: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        drawing = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
        }
    valid = ValidText(tokenizer, len(ids))
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _decoding(model), torch.no_grad():
        torch.manual_seed(sampling.seed)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([valid]),
            use_cache=True,
            **drawing,
        )
    return tokenizer.decode(valid.whole(output[0, len(ids) :].tolist()), skip_special_tokens=True)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, genre: str) -> list[int]:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid UTF-8; check the terminal's encoding") from None
    return tokenizer.convert_tokens_to_ids([genre_token(genre)]) + tokenizer.encode(prompt, add_special_tokens=False)


def _check_room(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Learned positions end; rotary ones go on, if not as well."""
    config = model.config.get_text_config()
    limit = config.max_position_embeddings
    if getattr(config, "rope_parameters", None) is None and prompt + new > limit:
        raise UserError(
            f"the model has positions for {limit} tokens, but the prompt has {prompt} and {new} are to be written; "
            "shorten the prompt or lower --max-new-tokens"
        )


@contextmanager
def _decoding(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, with an attention that reads a key-value cache."""
    training, implementation = model.training, model.config._attn_implementation
    checkpointing = model.is_activation_checkpointing
    model.eval()
    model.set_attn_implementation("sdpa")
    if checkpointing:
        model.activation_checkpointing_disable()
    try:
        yield
    finally:
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.set_attn_implementation(implementation)
        model.train(training)


class ValidText(LogitsProcessor):
    """Lets a byte-level tokenizer spell only valid UTF-8: a token that would break a character is never drawn.

    Does nothing for tokenizers of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._bytes = _token_bytes(tokenizer)
        self._allowed: dict[bytes, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask `scores` [batch, vocabulary] where the token cannot follow `input_ids` [batch, tokens]."""
        if not self._bytes:
            return scores
        allowed = [self._mask(_unfinished(self._spell(row[self._prompt_tokens :].tolist()))) for row in input_ids]
        return scores.masked_fill(~torch.stack(allowed).to(scores.device), float("-inf"))

    def whole(self, ids: list[int]) -> list[int]:
        """`ids` without the tokens at the end that spell only part of a character."""
        while self._bytes and _unfinished(self._spell(ids)):
            ids = ids[:-1]
        return ids

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(self._bytes[index] or b"" for index in ids[-4:])

    def _mask(self, begun: bytes) -> torch.Tensor:
        """Which tokens may follow the first bytes `begun` of a character; special tokens only between characters."""
        if begun not in self._allowed:
            fits = [not begun if piece is None else _is_prefix(begun + piece) for piece in self._bytes]
            self._allowed[begun] = torch.tensor(fits)
        return self._allowed[begun]


def _token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes | None]:
    """The bytes of each token, None for special ones; empty if the tokenizer is not byte-level."""
    state = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    if type(state).__name__ != "ByteLevel":
        return []
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    alphabet = _byte_alphabet()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [
        None if index in special or token is None else bytes(alphabet[char] for char in token)
        for index, token in enumerate(tokens)
    ]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _is_prefix(data: bytes) -> bool:
    """Whether some valid UTF-8 text begins with `data`."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _unfinished(data: bytes) -> bytes:
    """The bytes of a character begun but not ended at the end of `data`."""
    for count in range(1, min(3, len(data)) + 1):
        lead = data[-count]
        if lead >= 0xC0:
            needed = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return data[-count:] if count < needed else b""
        if lead < 0x80:
            return b""
    return b""
