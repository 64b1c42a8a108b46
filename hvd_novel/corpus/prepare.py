"""`hvd-novel prepare`: novels in, a token store out.

Files are read and cleaned once, into scratch files beside the store; a tokenizer is trained on them, unless one is
given; pieces of them are tokenised and labelled; the store is written. Ranks of a job share reading, tokenising and
labelling; training and writing fall to rank 0. The store does not depend on who did what.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from hvd_novel.corpus.crew import Alone, Crew
from hvd_novel.corpus.novels import TEXTS, Novel, ReadFile, read_files
from hvd_novel.corpus.pieces import TOKENS, EncodedNovels, Labels, encode_pieces, find_pieces, label_pieces
from hvd_novel.corpus.report import FileReport, Report, Share, length_percentiles, shares, sum_up
from hvd_novel.corpus.samples import SampleLengths, make_sample
from hvd_novel.corpus.scratch import ScratchReader
from hvd_novel.corpus.sources import Source, find_sources
from hvd_novel.corpus.store import SPLITS, SplitCounts, StoreSplit
from hvd_novel.corpus.stream import StreamEncoder
from hvd_novel.corpus.tokenizer import check_vocab_size, load_tokenizer, tokenizer_hash, train_tokenizer
from hvd_novel.corpus.work import Work
from hvd_novel.corpus.writer import (
    SplitWriter,
    check_target,
    choose_validation,
    replacing,
    tidy,
    write_header,
    write_novels,
)
from hvd_novel.errors import UserError
from hvd_novel.files import disk_errors

_TRAINING_BYTES = 16_000_000  # of files; training takes about 100 bytes of memory for each of them
_PIECE_CHARACTERS = 10_000  # of what the tokenizer is trained on
_SCRATCH, _SIGN = "scratch", "sign"


def _silent(message: str) -> None:
    pass


def prepare(
    paths: list[Path],
    out: Path,
    *,
    tokenizer: Path | None,
    vocab_size: int,
    max_len: int,
    min_len: int,
    overlap: int,
    validation_fraction: float,
    seed: int,
    progress: Callable[[str], None] = _silent,
    crew: Crew | None = None,
) -> Report:
    """Make the token store `out` from the novels in `paths`; the same input gives the same bytes.

    `tokenizer` is the folder of a Hugging Face tokenizer; without it one of `vocab_size` is trained on the corpus.
    Lengths are in tokens, see `samples`. About `validation_fraction` of the units go to the validation split,
    chosen by `seed` and content. `progress` is called with a line for each step. `crew` are the ranks that share the
    work, by default this process alone; all of them call this and get the report. Content that cannot be used is left
    out and reported; what makes the whole impossible raises UserError, on all ranks, and `out` is as it was.
    """
    lengths = SampleLengths(max_len, min_len, overlap)
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction {validation_fraction} must be at least 0 and below 1")
    if tokenizer is None:
        check_vocab_size(vocab_size)
    work = Work(crew or Alone(), out, progress)

    with ExitStack() as stack:
        sources, given, folder = _start(work, paths, out, tokenizer, stack)
        scratch = folder / _SCRATCH
        files = read_files(work, sources, scratch)
        novels = [novel for file in files for novel in file.novels]
        if not novels:
            raise UserError(_nothing_usable([file.report for file in files]))

        def provide_tokenizer() -> PreTrainedTokenizerFast:
            if given is None:
                progress(f"training a tokenizer of {vocab_size} tokens")
            provided = given or train_tokenizer(_training_texts(sources, novels, scratch), vocab_size)
            with disk_errors():
                provided.save_pretrained(folder / "tokenizer")
            return provided

        hf_tokenizer = work.lead("train", provide_tokenizer)
        encoder = StreamEncoder(hf_tokenizer)
        pieces = find_pieces(novels)
        encoded = encode_pieces(work, novels, pieces, encoder, scratch)
        streams = EncodedNovels(novels, pieces, encoded, lengths)
        labels = label_pieces(work, streams, scratch)

        def write() -> Report:
            counts = _write_splits(folder, streams, labels, encoder.genre_ids, validation_fraction, seed)
            write_novels(folder / "novels.arrow", _rows(files, streams))
            shutil.rmtree(scratch)
            report = _report(files, folder)
            (folder / "report.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
            write_header(
                folder,
                tokenizer_hash=tokenizer_hash(folder / "tokenizer"),
                vocab_size=len(hf_tokenizer),
                max_len=max_len,
                min_len=min_len,
                overlap=overlap,
                counts=counts,
            )
            stack.close()
            return report

        report = work.lead("write", write)
    work.say_seconds()
    return report


def _start(
    work: Work, paths: Sequence[Path], out: Path, tokenizer: Path | None, stack: ExitStack
) -> tuple[list[Source], PreTrainedTokenizerFast | None, Path]:
    """The files to read, the given tokenizer, and the folder that `stack`, on rank 0, will put in the place of `out`.

    All that can fail before anything is read; the folder holds another one for scratch files.
    """
    sources: list[Source] = []

    def lead() -> tuple[PreTrainedTokenizerFast | None, Path, str]:
        tidy(out)
        check_target(out)
        given = load_tokenizer(tokenizer) if tokenizer else None
        return given, *_open_folder(out, stack)

    def start() -> tuple[str, Any]:
        prepared = lead() if work.rank == 0 else None
        sources.extend(find_sources(paths, leave_out=out))
        return sha256("\0".join(f"{source.name}\0{source.size()}" for source in sources).encode()).hexdigest(), prepared

    started = work.each("start", start)
    if len({digest for digest, _ in started}) > 1:
        raise UserError(
            f"the files in {', '.join(map(str, paths))} are not the same on all ranks; "
            "put them on a file system that all ranks share"
        )
    given, folder, sign = started[0][1]
    work.each("shared", lambda: _check_shared(folder / _SCRATCH / _SIGN, sign, out))
    return sources, given, folder


def _open_folder(out: Path, stack: ExitStack) -> tuple[Path, str]:
    """The folder to be put in the place of `out`, and what is written into a file of it."""
    folder, sign = stack.enter_context(replacing(out)), uuid.uuid4().hex
    (folder / _SCRATCH).mkdir()
    (folder / _SCRATCH / _SIGN).write_text(sign)
    return folder, sign


def _check_shared(path: Path, sign: str, out: Path) -> None:
    with suppress(OSError):
        if path.read_text() == sign:
            return
    raise UserError(f"--out {out} is not on a file system that all ranks share; choose a place that all of them see")


def _training_texts(sources: Sequence[Source], novels: Sequence[Novel], scratch: Path) -> Iterator[str]:
    """Pieces of the novels for the tokenizer, spread evenly over a corpus that is too large for it."""
    size = sum(source.size() for source in sources)
    share, due = min(1.0, _TRAINING_BYTES / max(1, size)), 1.0
    with ScratchReader(scratch, TEXTS) as texts:
        for novel in novels:
            for start in range(0, novel.characters, _PIECE_CHARACTERS):
                if due >= 1:
                    yield texts.text(novel.text, start, min(start + _PIECE_CHARACTERS, novel.characters))
                    due -= 1
                due += share


def _write_splits(
    folder: Path,
    streams: EncodedNovels,
    labels: Sequence[Labels],
    genre_ids: dict[str, int],
    validation_fraction: float,
    seed: int,
) -> dict[str, SplitCounts]:
    """Write the samples of all novels, in order; returns the sums of each split."""
    keys = [f"{stream.novel.content}:{unit.chapter}" for stream in streams for unit in stream.units]
    chosen = choose_validation(keys, validation_fraction, seed)
    units = count()
    with ScratchReader(folder / _SCRATCH, TOKENS) as tokens, SplitWriter(folder) as writer:
        for index, stream in enumerate(streams):
            held_out = {unit.chapter for unit in stream.units if next(units) in chosen}
            genre = stream.novel.genre
            for window, (segment_type, characters) in zip(stream.windows, streams.labels(index, labels), strict=True):
                ids = stream.ids(window, tokens)
                sample = make_sample(window, ids, genre_ids[genre], segment_type, characters)
                writer.add(sample, index, genre, "validation" if window.chapter in held_out else "train")
    return writer.counts


def _rows(files: Sequence[ReadFile], streams: EncodedNovels) -> list[dict[str, Any]]:
    """The rows of novels.arrow; their tokens are added to the reports of their files."""
    rows, stream_of = [], iter(streams)
    for file in files:
        for novel in file.novels:
            tokens = next(stream_of).tokens
            file.report.tokens += tokens
            rows.append(
                {
                    "title": novel.title,
                    "author": novel.author,
                    "genre": novel.genre,
                    "path": novel.path,
                    "chapters": len(novel.chapters) - 1,
                    "characters": novel.characters,
                    "tokens": tokens,
                }
            )
    return rows


def _report(files: Sequence[ReadFile], folder: Path) -> Report:
    """The report on a folder whose splits are written; asserts that nothing was lost on the way there."""
    splits = {name: StoreSplit(folder / f"{name}.arrow") for name in SPLITS}
    samples = pa.concat_tables([split.columns() for split in splits.values()])
    lengths, trained, characters = (
        np.concatenate([getattr(split, name) for split in splits.values()])
        for name in ("lengths", "trained_tokens", "characters")
    )
    reports = [file.report for file in files]
    totals = sum_up(reports, samples=len(lengths), sample_tokens=int(lengths.sum(dtype=np.int64)))
    assert trained.sum(dtype=np.int64) == totals.tokens
    assert characters.sum(dtype=np.int64) == totals.characters.kept
    return Report(
        totals=totals,
        splits={
            name: Share(samples=len(split), tokens=int(split.trained_tokens.sum(dtype=np.int64)))
            for name, split in splits.items()
        },
        lengths=length_percentiles(lengths),
        genres=shares(samples["genre"], trained),
        segment_types=shares(samples["segment_type"], trained),
        unrecognised_genres=dict(sum((file.unrecognised_genres for file in files), Counter())),
        files=reports,
    )


def _nothing_usable(files: Sequence[FileReport]) -> str:
    reasons = "; ".join(f"{file.path}: {file.reason}" for file in files[:5])
    more = f"; and {len(files) - 5} more files" if len(files) > 5 else ""
    return f"none of the files can be used ({reasons}{more}); give novels as .txt, .json, .jsonl, .parquet or .epub"
