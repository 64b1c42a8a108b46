"""Pieces of novels: what ranks tokenise and label, so that one long novel is the work of many.

A piece is some neighbouring chapters. Its tokens do not depend on the rest of the novel; which samples they form does,
so samples are found, and their segment types looked up, when the tokens of all pieces are known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from hvd_novel.corpus.novels import TEXTS, Novel
from hvd_novel.corpus.samples import SampleLengths, Window, find_units, main_segment_type, unit_windows
from hvd_novel.corpus.scratch import Place, ScratchReader, ScratchWriter
from hvd_novel.corpus.segments import SEGMENT_TYPES
from hvd_novel.corpus.stream import StreamEncoder
from hvd_novel.corpus.work import Work

TOKENS = "tokens"

_PIECE_CHARACTERS = 1 << 17  # about a third of a second's work for one core


@dataclass(frozen=True)
class Piece:
    """Chapters [first, last) of the novel with index `novel`, of `characters` characters."""

    novel: int
    first: int
    last: int
    characters: int


@dataclass(frozen=True)
class Encoded:
    """The tokens of a piece: their ids, and after them how many characters of the piece each completes (both int32)."""

    place: Place
    chapter_tokens: np.ndarray
    """int64 [chapters of the piece], with the separator or end of text behind each."""


@dataclass(frozen=True)
class Labels:
    """Of the samples that begin in a piece: segment type (index in SEGMENT_TYPES) and characters, int32 [samples]."""

    segment_types: np.ndarray
    characters: np.ndarray


def find_pieces(novels: Sequence[Novel]) -> list[Piece]:
    """All pieces, in the order of the corpus; a chapter is never parted."""
    return [piece for index, novel in enumerate(novels) for piece in _novel_pieces(index, novel.chapters)]


def _novel_pieces(novel: int, chapters: np.ndarray) -> Iterator[Piece]:
    first, count = 0, len(chapters) - 1
    while first < count:
        full = int(np.searchsorted(chapters, chapters[first] + _PIECE_CHARACTERS, side="right")) - 1
        last = min(max(full, first + 1), count)
        yield Piece(novel, first, last, int(chapters[last] - chapters[first]))
        first = last


def encode_pieces(
    work: Work, novels: Sequence[Novel], pieces: Sequence[Piece], encoder: StreamEncoder, scratch: Path
) -> list[Encoded]:
    """The tokens of all pieces; they go to the scratch files TOKENS of the ranks that made them."""

    def encode(tasks: Iterator[int]) -> dict[int, Encoded]:
        with ScratchReader(scratch, TEXTS) as texts, ScratchWriter(scratch, TOKENS, work.rank) as tokens:
            return {
                task: _encode_piece(pieces[task], novels[pieces[task].novel], encoder, texts, tokens) for task in tasks
            }

    return work.share("encode", *_shares(novels, pieces), encode)


def label_pieces(work: Work, streams: EncodedNovels, scratch: Path) -> list[Labels]:
    """The labels of all pieces."""

    def label(tasks: Iterator[int]) -> dict[int, Labels]:
        with ScratchReader(scratch, TEXTS) as texts, ScratchReader(scratch, TOKENS) as tokens:
            return {task: streams.label_piece(task, texts, tokens) for task in tasks}

    return work.share("label", *_shares(streams.novels, streams.pieces), label)


def _shares(novels: Sequence[Novel], pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """Size and owner of each piece: the rank that has read its novel finds the text at hand."""
    return [piece.characters for piece in pieces], [novels[piece.novel].text.rank for piece in pieces]


def _encode_piece(
    piece: Piece, novel: Novel, encoder: StreamEncoder, texts: ScratchReader, tokens: ScratchWriter
) -> Encoded:
    """Tokenise a piece."""
    bounds = novel.chapters[piece.first : piece.last + 1]
    text = texts.text(novel.text, int(bounds[0]), int(bounds[-1]))
    cuts = bounds - bounds[0]
    chapters = [text[start:end] for start, end in pairwise(cuts)]
    stream = encoder.encode(chapters, ends=piece.last == len(novel.chapters) - 1)
    place = tokens.integers(stream.ids)
    tokens.integers(stream.characters[1:].astype(np.int32))
    return Encoded(place, np.array(stream.chapter_tokens, np.int64))


class EncodedNovel:
    """The token stream of a novel, read from where its pieces were written."""

    def __init__(
        self, novel: Novel, pieces: Sequence[Piece], encoded: Sequence[Encoded], lengths: SampleLengths
    ) -> None:
        self.novel = novel
        self._pieces, self._encoded = pieces, encoded
        self._bounds = np.cumsum([0, *(part.chapter_tokens.sum() for part in encoded)], dtype=np.int64)
        chapter_tokens = np.concatenate([part.chapter_tokens for part in encoded]).tolist()
        self.units = find_units(chapter_tokens, lengths.min_len)
        self.windows = [window for unit in self.units for window in unit_windows(unit, lengths)]

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self._bounds[-1])

    def windows_of(self, piece: int) -> list[Window]:
        """The windows that begin in the piece of that index in the novel."""
        first, last = (
            bisect_left(self.windows, bound, key=lambda window: window.start)
            for bound in self._bounds[piece : piece + 2].tolist()
        )
        return self.windows[first:last]

    def ids(self, window: Window, tokens: ScratchReader) -> np.ndarray:
        """The tokens of a window with the overlap before them, int32."""
        start, end = window.start - window.overlap, window.end
        parts = []
        for piece in range(self._piece_of(start), self._piece_of(end - 1) + 1):
            before, after = int(self._bounds[piece]), int(self._bounds[piece + 1])
            place = self._encoded[piece].place
            parts.append(tokens.integers(place, max(start, before) - before, min(end, after) - before))
        return np.concatenate(parts)

    def characters(self, position: int, tokens: ScratchReader) -> int:
        """How many characters of the novel's text the first `position` tokens complete."""
        if position == 0:
            return 0
        piece = self._piece_of(position - 1)
        before, after = int(self._bounds[piece]), int(self._bounds[piece + 1])
        index = (after - before) + (position - 1 - before)  # the ids come first
        within = tokens.integers(self._encoded[piece].place, index, index + 1)[0]
        return int(self.novel.chapters[self._pieces[piece].first]) + int(within)

    def _piece_of(self, token: int) -> int:
        return int(np.searchsorted(self._bounds, token, side="right")) - 1


class EncodedNovels:
    """The streams of all novels, each made when it is asked for."""

    def __init__(
        self, novels: Sequence[Novel], pieces: Sequence[Piece], encoded: Sequence[Encoded], lengths: SampleLengths
    ) -> None:
        self.novels, self.pieces = novels, pieces
        self._encoded, self._lengths = encoded, lengths
        self._first = np.searchsorted([piece.novel for piece in pieces], np.arange(len(novels) + 1))
        self._last: tuple[int, EncodedNovel] | None = None

    def __iter__(self) -> Iterator[EncodedNovel]:
        return (self[index] for index in range(len(self.novels)))

    def __getitem__(self, novel: int) -> EncodedNovel:
        if self._last is None or self._last[0] != novel:  # the pieces of a novel are often asked for in a row
            mine = slice(self._first[novel], self._first[novel + 1])
            stream = EncodedNovel(self.novels[novel], self.pieces[mine], self._encoded[mine], self._lengths)
            self._last = novel, stream
        return self._last[1]

    def label_piece(self, index: int, texts: ScratchReader, tokens: ScratchReader) -> Labels:
        """Segment types and lengths in characters of the samples that begin in a piece."""
        novel = self.pieces[index].novel
        stream = self[novel]
        segment_types, characters = [], []
        for window in stream.windows_of(index - int(self._first[novel])):
            first, last = (stream.characters(position, tokens) for position in (window.start, window.end))
            segment_types.append(SEGMENT_TYPES.index(main_segment_type(texts.text(stream.novel.text, first, last))))
            characters.append(last - first)
        return Labels(np.array(segment_types, np.int32), np.array(characters, np.int32))

    def labels(self, novel: int, labels: Sequence[Labels]) -> Iterator[tuple[str, int]]:
        """Segment type and characters of each window of a novel, from the labels of all pieces."""
        for part in labels[self._first[novel] : self._first[novel + 1]]:
            for segment_type, characters in zip(part.segment_types, part.characters, strict=True):
                yield SEGMENT_TYPES[segment_type], int(characters)
