from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from hvd_novel.corpus import prepare as prepares
from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.crew import Alone
from hvd_novel.corpus.genres import UNKNOWN
from hvd_novel.corpus.novels import read_files
from hvd_novel.corpus.prepare import prepare
from hvd_novel.corpus.report import Report, length_percentiles, render
from hvd_novel.corpus.store import TokenStore, is_store
from hvd_novel.corpus.work import Work
from hvd_novel.errors import UserError
from tests.corpus.corpora import OPTIONS, contents, mixed_corpus
from tests.corpus.texts import TRADITIONAL, novel


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return mixed_corpus(tmp_path / "books")


def test_everything_usable_is_kept_and_the_rest_reported(corpus: Path, tmp_path: Path) -> None:
    report = prepare([corpus], tmp_path / "store", **OPTIONS)
    assert report == Report.model_validate_json((tmp_path / "store" / "report.json").read_text(encoding="utf-8"))
    found = {file.path: (file.status, file.reason, file.encoding, file.novels, file.chapters) for file in report.files}
    assert found == {
        "books/big5.txt": ("ok", "", "big5", 1, 3),
        "books/broken.epub": ("skipped", "corrupt epub: BadZipFile: File is not a zip file", None, 0, 0),
        "books/cover.jpg": ("skipped", "unsupported suffix", None, 0, 0),
        "books/cut.txt": ("partial", "1 undecodable byte dropped", "gb18030", 1, 2),
        "books/empty.txt": ("skipped", "the novel has no text", "utf-8", 0, 0),
        "books/list.json": ("partial", "object 2: the novel has no text (and 1 more)", "utf-8", 1, 2),
        "books/many.jsonl": (
            "partial",
            "line 5: invalid JSON: Expecting property name enclosed in double quotes: column 2 (char 1)",
            "utf-8",
            9,
            18,
        ),
        "books/noise.txt": ("skipped", "undecodable: the content looks binary", None, 0, 0),
        "books/table.parquet": ("ok", "", None, 1, 3),
        "books/玄幻/龙.txt": ("ok", "", "utf-8", 1, 4),
    }
    assert report.unrecognised_genres == {"烹饪": 1}
    assert report.totals.undecodable_bytes == 1
    counts = report.totals
    assert (counts.files, counts.ok, counts.partial, counts.skipped) == (10, 3, 3, 4)
    assert (counts.novels, counts.chapters) == (14, 32)


def test_the_accounts_close(corpus: Path, tmp_path: Path) -> None:
    report = prepare([corpus], tmp_path / "store", **OPTIONS)
    for account in [report.totals.characters, *(file.characters for file in report.files)]:
        assert account.read == account.kept + sum(account.removed.values())
    by_path = {file.path: file.characters for file in report.files}
    assert by_path["books/玄幻/龙.txt"].kept == len(novel(4))
    assert by_path["books/玄幻/龙.txt"].removed["line_ends"] == novel(4).count("\n")
    assert by_path["books/list.json"].read == len(novel(2, 3)) + len(" \n\u3000 ")

    store = TokenStore.open(tmp_path / "store")
    splits = [store.split(name) for name in ("train", "validation")]
    assert sum(split.characters.sum() for split in splits) == report.totals.characters.kept
    assert sum(split.trained_tokens.sum() for split in splits) == report.totals.tokens
    assert sum(split.lengths.sum() for split in splits) == report.totals.sample_tokens
    assert sum(len(split) for split in splits) == report.totals.samples
    assert sum(file.tokens for file in report.files) == report.totals.tokens
    for shares in (report.splits, report.genres, report.segment_types):
        assert sum(share.samples for share in shares.values()) == report.totals.samples
        assert sum(share.tokens for share in shares.values()) == report.totals.tokens
    assert set(report.genres) == {"fantasy", "scifi", UNKNOWN}
    lengths = np.concatenate([split.lengths for split in splits])
    assert (report.lengths["min"], report.lengths["max"]) == (lengths.min(), lengths.max())
    assert report.lengths["mean"] == round(float(lengths.mean()), 2)
    assert list(report.lengths) == ["min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean"]


def test_percentiles_are_lengths_of_samples() -> None:
    found = length_percentiles(np.array([10, 21, 30, 40], np.int32))
    assert set(found) == {"min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean"}
    assert (found["min"], found["max"], found["mean"]) == (10, 40, 25.25)
    assert {value for name, value in found.items() if name != "mean"} <= {10, 21, 30, 40}


def test_the_store_holds_the_text_of_the_novels(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus / "玄幻", corpus / "table.parquet"], tmp_path / "store", **OPTIONS)
    store = TokenStore.open(tmp_path / "store")
    tokenizer = store.load_tokenizer()
    streams: list[dict[int, np.ndarray]] = [{}, {}]
    for name in ("train", "validation"):
        split = store.split(name)
        for index, row in enumerate(split.columns().to_pylist()):
            ids = split.input_ids(index)
            assert ids[0] == tokenizer.convert_tokens_to_ids(f"<|genre_{row['genre']}|>")
            streams[row["novel"]][row["token_start"]] = ids[row["context"] :]
    for stream, text in zip(streams, [novel(4), novel(3, 2)], strict=True):
        ids = np.concatenate([stream[start] for start in sorted(stream)])
        assert tokenizer.decode(ids, skip_special_tokens=True) == clean(text).text
        assert ids[-1] == tokenizer.eos_token_id
        assert np.count_nonzero(ids == tokenizer.convert_tokens_to_ids("<|chapter_sep|>")) == text.count("章 ") - 1
    assert store.novels["author"].to_pylist() == ["", "佚名"]
    assert store.novels["title"].to_pylist() == ["龙", "table"]


def test_equal_input_gives_equal_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "a", **OPTIONS)
    script = (
        "import json, sys; from pathlib import Path; from hvd_novel.corpus.prepare import prepare; "
        "prepare([Path(sys.argv[1])], Path(sys.argv[2]), **json.loads(sys.argv[3]))"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    corpus.rename(elsewhere / "books")  # where the corpus lies makes no difference
    command = [sys.executable, "-c", script, "../elsewhere/books", "b", json.dumps(OPTIONS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, cwd=elsewhere, env=environment)
    assert contents(tmp_path / "a") == contents(elsewhere / "b")
    prepare([elsewhere / "books"], tmp_path / "c", **{**OPTIONS, "seed": 2})
    fingerprints = [TokenStore.open(tmp_path / name).fingerprint for name in ("a", "c")]
    assert fingerprints[0] != fingerprints[1]


def test_an_existing_tokenizer(corpus: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    lines: list[str] = []
    prepare([corpus], tmp_path / "store", **{**OPTIONS, "tokenizer": tokenizer_folder}, progress=lines.append)
    assert TokenStore.open(tmp_path / "store").header["vocab_size"] == 500
    assert lines[-2] == "file 10 of 10: books/玄幻/龙.txt"
    assert lines[-1].startswith("seconds (")


def test_validation_does_not_depend_on_the_order_of_files(tmp_path: Path, tokenizer_folder: Path) -> None:
    texts, found = [novel(9), novel(9, text=TRADITIONAL)], []
    for order in (texts, texts[::-1]):
        for name, text in zip("ab", order, strict=True):
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        books = [tmp_path / "a.txt", tmp_path / "b.txt"]
        prepare(books, tmp_path / "store", **{**OPTIONS, "tokenizer": tokenizer_folder, "validation_fraction": 0.3})
        split = TokenStore.open(tmp_path / "store").split("validation")
        found.append({tuple(split.input_ids(index)) for index in range(len(split))})
    assert found[0] == found[1]


def test_training_text_is_spread_over_a_large_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name * 2000, encoding="utf-8")
    monkeypatch.setattr(prepares, "_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(prepares, "_TRAINING_BYTES", 4000)
    sources = prepares.find_sources([tmp_path], tmp_path / "out")
    (tmp_path / "scratch").mkdir()
    files = read_files(Work(Alone(), tmp_path / "out", print), sources, tmp_path / "scratch")
    novels = [novel for file in files for novel in file.novels]
    pieces = list(prepares._training_texts(sources, novels, tmp_path / "scratch"))
    assert [piece[0] for piece in pieces] == [name for name in "abcdefgh" for _ in range(5)]


def test_an_existing_store_is_replaced_and_a_failure_leaves_it(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.mkdir()
    prepare([corpus / "big5.txt"], out, **OPTIONS)
    first = TokenStore.open(out)
    ids = first.split("train").input_ids(0).copy()
    prepare([corpus / "玄幻"], out, **OPTIONS)
    assert TokenStore.open(out).novels["title"].to_pylist() == ["龙"]
    assert np.array_equal(first.split("train").input_ids(0), ids)  # what is mapped stays readable
    before = contents(out)
    with pytest.raises(UserError, match="none of the files can be used"):
        prepare([corpus / "empty.txt"], out, **OPTIONS)
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "store"]


def test_the_old_store_goes_when_the_new_one_stands(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, remove, removed = tmp_path / "store", shutil.rmtree, []

    def watch(path: Path, **options: Any) -> None:
        if is_store(path):
            removed.append(TokenStore.open(path).novels["title"].to_pylist())
            assert TokenStore.open(out).novels["title"].to_pylist() == ["龙"]
        remove(path, **options)

    prepare([corpus / "big5.txt"], out, **OPTIONS)
    monkeypatch.setattr(shutil, "rmtree", watch)
    prepare([corpus / "玄幻"], out, **OPTIONS)
    assert removed == [["big5"]]


def test_what_else_is_in_a_store_is_not_lost(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    prepare([corpus / "big5.txt"], out, **OPTIONS)
    (out / "tokenizer" / "notes.txt").write_text("x")
    (out / "runs" / "x").mkdir(parents=True)
    before, lines = contents(out), list[str]()
    for foreign in ("runs", "tokenizer/notes.txt"):
        with pytest.raises(UserError, match=rf"--out .*store holds {foreign}, which is not part .*; move it away or"):
            prepare([corpus], out, **OPTIONS, progress=lines.append)
        shutil.rmtree(out / "runs", ignore_errors=True)
    assert contents(out) == before
    assert lines == []  # refused before the work
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "store"]


def test_what_comes_into_a_store_during_the_work_is_not_lost(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "store", prepares.write_header
    prepare([corpus / "big5.txt"], out, **OPTIONS)

    def write_and_add(*arguments: Any, **facts: Any) -> None:
        write(*arguments, **facts)
        (out / "run.log").write_text("x")

    monkeypatch.setattr(prepares, "write_header", write_and_add)
    with pytest.raises(UserError, match="holds run.log, which is not part of the token store"):
        prepare([corpus / "玄幻"], out, **OPTIONS)
    assert TokenStore.open(out).novels["title"].to_pylist() == ["big5"]
    assert (out / "run.log").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "store"]


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_kill_while_the_store_is_replaced(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    prepare([corpus / "big5.txt"], out, **OPTIONS)
    script = (
        "import json, os, sys; from pathlib import Path; from hvd_novel.corpus import writer; "
        "from hvd_novel.corpus.prepare import prepare; rename = Path.rename; "
        "Path.rename = lambda a, b: os._exit(9) if a.suffix == '.partial' else rename(a, b); "
        "prepare([Path(sys.argv[1])], Path(sys.argv[2]), **json.loads(sys.argv[3]))"
    )
    command = [sys.executable, "-c", script, str(corpus / "玄幻"), str(out), json.dumps(OPTIONS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment).returncode == 9
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".old", ".partial", ""]
    with pytest.raises(UserError, match=r"token store .*store is at .*\.store\.\d+\.old: .* rename it, or run"):
        TokenStore.open(out)
    with pytest.raises(UserError, match="none of the files can be used"):  # whatever becomes of the next run
        prepare([corpus / "empty.txt"], out, **OPTIONS)
    assert TokenStore.open(out).novels["title"].to_pylist() == ["big5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "store"]


def test_only_leftovers_of_dead_processes_are_removed(corpus: Path, tmp_path: Path) -> None:
    dead, living = dead_process(), os.getppid()
    kept = [f".store.{living}.partial", ".store.notes", f".other.{dead}.partial", f"store.{dead}.partial"]
    for name in [*kept, f".store.{dead}.partial", f".store.{os.getpid()}.partial", f".store.{dead}.old"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for _ in range(2):
        prepare([corpus / "big5.txt"], tmp_path / "store", **OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"books", "store", *kept}


def test_a_link_to_itself_and_a_closed_folder_are_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "self.txt").symlink_to("self.txt")
    listing = Path.iterdir

    def refuse(path: Path) -> Any:
        if path.name == "玄幻":
            raise PermissionError(13, "Permission denied")
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    report = prepare([corpus], tmp_path / "store", **OPTIONS)
    reasons = {file.path: (file.status, file.reason) for file in report.files}
    assert reasons["books/self.txt"] == ("skipped", "unreadable: Too many levels of symbolic links")
    assert reasons["books/玄幻"] == ("skipped", "unreadable: Permission denied")
    assert reasons["books/big5.txt"] == ("ok", "")


def test_no_file_is_read_twice(corpus: Path, tmp_path: Path) -> None:
    report = prepare([corpus / "big5.txt", corpus, corpus, corpus / "玄幻"], tmp_path / "store", **OPTIONS)
    assert (report.totals.files, report.totals.novels) == (10, 14)


@pytest.mark.parametrize("what", ["novels", "tokenizer"])
def test_a_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    class Full(PreTrainedTokenizerFast):
        def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
            self.backend_tokenizer.save("/dev/full")  # raises what the library raises

    if what == "novels":
        monkeypatch.setattr(prepares, "write_novels", full)
    else:
        train = prepares.train_tokenizer
        monkeypatch.setattr(
            prepares, "train_tokenizer", lambda *given: Full(tokenizer_object=train(*given).backend_tokenizer)
        )
    with pytest.raises(UserError, match=r"--out .*store cannot be written: No space left on device.*; make room"):
        prepare([corpus], tmp_path / "store", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["books"]


def test_the_store_itself_is_not_read(corpus: Path) -> None:
    for _ in range(2):
        report = prepare([corpus], corpus / "store", **OPTIONS)
        assert report.totals.files == 10


def test_a_single_short_novel(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("雨。", encoding="utf-8")
    report = prepare([tmp_path / "a.txt"], tmp_path / "store", **OPTIONS)
    assert (report.totals.samples, report.totals.characters.kept) == (1, 2)
    assert report.splits["validation"].samples == 0
    assert TokenStore.open(tmp_path / "store").split("train").context.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_len": 80}, r"--max-len 80, --min-len 32 and --overlap 16 do not fit together: .* \(here 81\)"),
        ({"vocab_size": 100}, "--vocab-size 100 is too small"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0 must be at least 0 and below 1"),
        ({"tokenizer": Path("absent")}, "--tokenizer absent is not a folder"),
    ],
)
def test_impossible_settings(corpus: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare([corpus], tmp_path / "store", **{**OPTIONS, **change})
    assert not (tmp_path / "store").exists()


def test_impossible_places(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent does not exist"):
        prepare([tmp_path / "absent"], tmp_path / "store", **OPTIONS)
    with pytest.raises(UserError, match=r"--out .*books exists and is not a token store; choose another folder"):
        prepare([corpus], corpus, **OPTIONS)
    with pytest.raises(UserError, match=r"--out .*list.json exists and is not a token store"):
        prepare([corpus], corpus / "list.json", **OPTIONS)
    with pytest.raises(UserError, match=r"--out .*store cannot be written: Not a directory"):
        prepare([corpus], corpus / "list.json" / "store", **OPTIONS)
    assert (corpus / "list.json").is_file()


def test_nothing_usable_names_the_reasons(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cover.jpg: unsupported suffix; empty.txt: the novel has no text\); give novels"
    ):
        prepare([corpus / "cover.jpg", corpus / "empty.txt"], tmp_path / "store", **OPTIONS)


def test_the_report_as_tables(corpus: Path, tmp_path: Path) -> None:
    for number in range(15):
        (corpus / f"z{number}.txt").write_text(novel(1, 1), encoding="utf-8")
    report = prepare([corpus], tmp_path / "store", **OPTIONS)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render(report, console)
    text = console.export_text()
    assert "books/cover.jpg" in text
    assert "unsupported suffix" in text
    assert "z1.txt" not in text
    assert "18 more files are ok" in text
    assert "genres not recognised, counted as unknown: 烹饪 (1)" in text
    assert f"{report.totals.characters.read:,} read = {report.totals.characters.kept:,} kept" in text


def cells(table: str, column: int) -> str:
    """What a column of a printed table says, joined over its lines."""
    lines = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    return "".join("".join(line[column].split()) for line in lines)


def test_names_and_reasons_are_whole_on_a_narrow_terminal(corpus: Path, tmp_path: Path) -> None:
    long = "x" * 70
    (corpus / f"{long}.txt").write_bytes(b"\xff" * 9)
    (corpus / "玄幻" / f"{'很长的名字' * 10}.txt").write_text(novel(1, 1), encoding="utf-8")
    report = prepare([corpus], tmp_path / "store", **OPTIONS)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render(report, console)
    text = console.export_text()
    assert "…" not in text
    files, reasons = text.split("└")[:2]
    assert cells(files, 1) == "".join(file.path for file in report.files)
    assert cells(reasons, 1) == "".join(file.path for file in report.files if file.reason)
    assert cells(reasons, 2) == "".join("".join(file.reason.split()) for file in report.files)
    assert all(f"{file.tokens:,} │" in files for file in report.files)


class OneOfTwo(Alone):
    """A crew whose other rank sees another disk."""

    size = 2

    def __init__(self, step: str, other: Any) -> None:
        self._step, self._other = step, other

    def do(self, name: str, action: Callable[[], Any]) -> list[Any]:
        return [action(), self._other if name == self._step else None]


def test_ranks_that_do_not_share_their_files(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="books are not the same on all ranks; put them on a file system that all"):
        prepare([corpus], tmp_path / "store", **OPTIONS, crew=OneOfTwo("start", ("another listing", None)))
    for content in (None, "of another job"):
        if content:
            (tmp_path / "sign").write_text(content)
        with pytest.raises(UserError, match="--out out is not on a file system that all ranks share; choose a place"):
            prepares._check_shared(tmp_path / "sign", "of this job", Path("out"))
    assert not (tmp_path / "store").exists()
