"""A novel as one stream of tokens, and how many characters each token stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from hvd_novel.corpus.genres import GENRES
from hvd_novel.corpus.tokenizer import CHAPTER_SEP, genre_token


@dataclass(frozen=True)
class TokenStream:
    """Chapter 1, separator, chapter 2, separator, ..., last chapter, end of text.

    `ids` is int32 [tokens]. `characters` is int64 [tokens + 1]: how many characters of the novel's text are
    complete after the first k tokens; it ends at the length of the text. `chapter_tokens` has the number of
    tokens of each chapter with the separator or end of text behind it.
    """

    ids: np.ndarray
    characters: np.ndarray
    chapter_tokens: list[int]


class StreamEncoder:
    """Turns novels into token streams. Text that spells a special token stays ordinary text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        # A copy: no tokens around the text, offsets as they are, special tokens not looked for, nothing cut off.
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.post_processor = None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._separator = tokenizer.convert_tokens_to_ids(CHAPTER_SEP)
        self._end = tokenizer.eos_token_id
        self.genre_ids = {genre: tokenizer.convert_tokens_to_ids(genre_token(genre)) for genre in GENRES}

    def encode(self, chapters: Sequence[str], ends: bool = True) -> TokenStream:
        """The stream of a novel of at least one chapter; the chapters, joined, are its text.

        `ends` says whether the novel ends with them; a separator follows the last otherwise.
        """
        closing = [self._separator] * (len(chapters) - 1) + [self._end if ends else self._separator]
        ids, characters, before = [], [np.zeros(1, np.int64)], 0
        for chapter, encoding, token in zip(chapters, self._encode(chapters), closing, strict=True):
            ids.append(np.array([*encoding.ids, token], np.int32))
            characters.append(before + _complete(encoding, len(chapter)))
            before += len(chapter)
        return TokenStream(np.concatenate(ids), np.concatenate(characters), [len(part) for part in ids])

    def _encode(self, chapters: Sequence[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch(list(chapters), add_special_tokens=False)


def _complete(encoding: Encoding, length: int) -> np.ndarray:
    """Characters complete after each token of a chapter of `length` characters and after its separator.

    A character spread over several byte tokens is complete with the last of them: after a token, everything is
    complete that lies before the start of all later tokens.
    """
    starts = np.array([start for start, _ in encoding.offsets[1:]] + [length], np.int64)
    complete = np.minimum.accumulate(starts[::-1])[::-1]
    return np.append(complete, length) if encoding.ids else complete
