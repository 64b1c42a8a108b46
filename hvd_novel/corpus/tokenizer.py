"""The tokenizer of a store: trained on the corpus, or any Hugging Face tokenizer with our special tokens added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hvd_novel.corpus.genres import GENRES
from hvd_novel.errors import UserError

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CHAPTER_SEP = "<|chapter_sep|>"


def genre_token(genre: str) -> str:
    """The special token that opens every sample of `genre`, one of GENRES."""
    return f"<|genre_{genre}|>"


SPECIAL_TOKENS = (END_OF_TEXT, PAD, CHAPTER_SEP, *(genre_token(genre) for genre in GENRES))
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""Every byte is a token, so that any text can be written and read back."""


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError if `vocab_size` is below SMALLEST_VOCABULARY."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size {vocab_size} is too small; give at least {SMALLEST_VOCABULARY}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) on `texts`; the same texts give the same ids.

    `vocab_size` counts the special tokens, which come first, and is reached if the texts are varied enough.
    Raises UserError if `check_vocab_size` refuses it.
    """
    check_vocab_size(vocab_size)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the Hugging Face tokenizer in `folder` and add those of our special tokens that it lacks.

    Its own end-of-text, beginning and padding tokens stay in use where it has them. Raises UserError if `folder`
    does not hold a tokenizer that the `tokenizers` library can run.
    """
    if not folder.is_dir():
        raise UserError(f"--tokenizer {folder} is not a folder; give the folder of a Hugging Face tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # which one depends on the file that is missing or damaged
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--tokenizer {folder} does not hold a Hugging Face tokenizer: {reason}") from None
    if not tokenizer.is_fast:
        raise UserError(
            f"--tokenizer {folder} has no 'fast' form; convert it so that the folder holds a tokenizer.json"
        )
    own = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD}
    missing = {role: token for role, token in own.items() if getattr(tokenizer, role) is None}
    tokenizer.add_special_tokens(missing)
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIAL_TOKENS[2:])}, replace_extra_special_tokens=False)
    if max(tokenizer.get_vocab().values()) >= len(tokenizer):
        raise UserError(f"--tokenizer {folder} leaves gaps between its token ids; such a vocabulary cannot be used")
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 (hexadecimal) of what decides about ids in a tokenizer folder: its model and its special tokens.

    Loading and saving a tokenizer again does not change it. Raises FileNotFoundError without a tokenizer.json and
    ValueError if a file is not JSON.
    """
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for call_time_setting in ("truncation", "padding"):
        model.pop(call_time_setting, None)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {key: value for key, value in config.items() if key.endswith(("_token", "_special_tokens"))}
    canonical = json.dumps([model, special], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
