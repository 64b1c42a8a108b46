"""`hvd-novel prepare`: novels in, a token store out.

The files are read twice, once to train the tokenizer (unless one is given) and once to make samples; one novel is
in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_novel.corpus.chapters import split_chapters
from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.genres import UNKNOWN, recognise
from hvd_novel.corpus.readers import Item, Problem, Record, read_records
from hvd_novel.corpus.report import Characters, FileReport, Report, Share, length_percentiles, shares, sum_up
from hvd_novel.corpus.samples import SampleLengths, find_units, unit_samples
from hvd_novel.corpus.sources import Source, find_sources
from hvd_novel.corpus.store import SPLITS, StoreSplit
from hvd_novel.corpus.stream import StreamEncoder, TokenStream
from hvd_novel.corpus.tokenizer import load_tokenizer, tokenizer_hash, train_tokenizer
from hvd_novel.corpus.writer import SampleWriter, check_target, replacing, tidy, write_header, write_novels
from hvd_novel.errors import UserError

_TRAINING_BYTES = 16_000_000  # of files; training takes about 100 bytes of memory for each of them
_PIECE_CHARACTERS = 10_000


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
) -> Report:
    """Make the token store `out` from the novels in `paths`; the same input gives the same bytes.

    `tokenizer` is the folder of a Hugging Face tokenizer; without it one of `vocab_size` is trained on the corpus.
    Lengths are in tokens, see `samples`. About `validation_fraction` of the units go to the validation split,
    chosen by `seed` and content. `progress` is called with a line for each step. Content that cannot be used is left
    out and reported; what makes the whole impossible raises UserError, and `out` is as it was.
    """
    lengths = SampleLengths(max_len, min_len, overlap)
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction {validation_fraction} must be at least 0 and below 1")
    tidy(out)
    check_target(out)
    sources = find_sources(paths, leave_out=out)
    if tokenizer is None:
        progress(f"training a tokenizer of {vocab_size} tokens")
        hf_tokenizer = train_tokenizer(_training_texts(sources), vocab_size)
    else:
        hf_tokenizer = load_tokenizer(tokenizer)

    with replacing(out) as folder:
        hf_tokenizer.save_pretrained(folder / "tokenizer")
        with SampleWriter(folder / "samples.arrow") as writer:
            corpus = _Corpus(StreamEncoder(hf_tokenizer), lengths, writer)
            for number, source in enumerate(sources, 1):
                progress(f"file {number} of {len(sources)}: {source.name}")
                corpus.add_file(source)
        if not corpus.novels:
            raise UserError(_nothing_usable(corpus.files))
        counts = writer.split(folder, validation_fraction, seed)
        write_novels(folder / "novels.arrow", corpus.novels)
        report = _report(corpus, folder)
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
    return report


def _training_texts(sources: Sequence[Source]) -> Iterator[str]:
    """Pieces of the cleaned novels for the tokenizer, spread evenly over a corpus that is too large for it."""
    size = sum(source.path.stat().st_size for source in sources if not source.unreadable and source.path.is_file())
    share, due = min(1.0, _TRAINING_BYTES / max(1, size)), 1.0
    for source in sources:
        for record in _read(source):
            text = clean(record.text).text if isinstance(record, Record) else ""
            for start in range(0, len(text), _PIECE_CHARACTERS):
                if due >= 1:
                    yield text[start : start + _PIECE_CHARACTERS]
                    due -= 1
                due += share


def _read(source: Source) -> Iterator[Item]:
    if source.unreadable:
        yield Problem(f"unreadable: {source.unreadable}")
    else:
        yield from read_records(source.path)


class _Corpus:
    """The second reading: samples go to the writer, rows of novels.arrow and reports per file are kept."""

    def __init__(self, encoder: StreamEncoder, lengths: SampleLengths, writer: SampleWriter) -> None:
        self._encoder, self._lengths, self._writer = encoder, lengths, writer
        self.novels: list[dict[str, Any]] = []
        self.files: list[FileReport] = []
        self.unrecognised_genres: Counter[str] = Counter()

    def add_file(self, source: Source) -> None:
        """Read a file to its end; what cannot be used becomes a line of its report."""
        file = FileReport(path=source.name)
        for item in _read(source):
            if isinstance(item, Problem):
                file.problems.append(str(item))
                file.undecodable_bytes += item.dropped_bytes
            else:
                self._add_novel(item, source, file)
        file.close()
        self.files.append(file)

    def _add_novel(self, record: Record, source: Source, file: FileReport) -> None:
        cleaned = clean(record.text)
        chapters = split_chapters(cleaned.text)
        file.encoding = record.encoding
        file.characters.add(Characters(read=len(record.text), kept=len(cleaned.text), removed=cleaned.removed))
        if not chapters:
            file.problems.append(str(Problem("the novel has no text", record.place)))
            return
        genre = self._genre(record, source)
        stream = self._encoder.encode(chapters)
        self._add_samples(cleaned.text, stream, genre)
        file.novels += 1
        file.chapters += len(chapters)
        file.tokens += len(stream.ids)
        self.novels.append(
            {
                "title": _line(record.title) or source.path.stem,
                "author": _line(record.author),
                "genre": genre,
                "path": source.name,
                "chapters": len(chapters),
                "characters": len(cleaned.text),
                "tokens": len(stream.ids),
            }
        )

    def _add_samples(self, text: str, stream: TokenStream, genre: str) -> None:
        content = hashlib.sha256(text.encode("utf-8")).hexdigest()
        genre_id = self._encoder.genre_ids[genre]
        for unit in find_units(stream.chapter_tokens, self._lengths.min_len):
            samples = list(unit_samples(unit, stream, text, genre_id, self._lengths))
            self._writer.add_unit(f"{content}:{unit.chapter}", samples, novel=len(self.novels), genre=genre)

    def _genre(self, record: Record, source: Source) -> str:
        written = _line(record.genre)
        if not written:
            return source.genre or UNKNOWN
        genre = recognise(written)
        if genre is None:
            self.unrecognised_genres[written] += 1
        return genre or UNKNOWN


def _line(label: str | None) -> str:
    """A title, author or genre as one clean line; empty if there is none."""
    return " ".join(clean(label or "").text.split())


def _report(corpus: _Corpus, folder: Path) -> Report:
    """The report on a folder whose splits are written; asserts that nothing was lost on the way there."""
    splits = {name: StoreSplit(folder / f"{name}.arrow") for name in SPLITS}
    samples = pa.concat_tables([split.columns() for split in splits.values()])
    lengths, trained, characters = (
        np.concatenate([getattr(split, name) for split in splits.values()])
        for name in ("lengths", "trained_tokens", "characters")
    )
    totals = sum_up(corpus.files, samples=len(lengths), sample_tokens=int(lengths.sum(dtype=np.int64)))
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
        unrecognised_genres=dict(corpus.unrecognised_genres),
        files=corpus.files,
    )


def _nothing_usable(files: Sequence[FileReport]) -> str:
    reasons = "; ".join(f"{file.path}: {file.reason}" for file in files[:5])
    more = f"; and {len(files) - 5} more files" if len(files) > 5 else ""
    return f"none of the files can be used ({reasons}{more}); give novels as .txt, .json, .jsonl, .parquet or .epub"
