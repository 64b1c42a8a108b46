"""How much faster several ranks prepare a corpus in which one novel is 20 times as long as each of the others.

    python -m hvd_novel.bench.prepare NOVELS [--ranks 2] [--rounds 3] [--copies 2] [--others 8]

One process without a launcher and `mpirun -np RANKS` take turns, with one tokenizer thread a rank. The tokenizer is
trained before, and timed apart. One JSON object is printed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_novel.corpus.clean import clean
from hvd_novel.corpus.readers import Record, read_records
from hvd_novel.corpus.sources import find_sources
from hvd_novel.corpus.store import TokenStore
from hvd_novel.corpus.tokenizer import train_tokenizer
from hvd_novel.errors import UserError

_TIMES_LONGER = 20
_VOCABULARY = 8192
_PREPARE = [sys.executable, "-c", "from hvd_novel.cli import main; main()", "prepare"]


def measure(novels: Path, folder: Path, *, ranks: int, rounds: int, copies: int, others: int) -> dict[str, Any]:
    """Measure in `folder`; the giant is all of `novels`, `copies` times over, the `others` are slices of it.

    `speedup` divides the seconds of one process by those of `ranks` (medians over `rounds`), in the steps from the
    first file read to the store in place, and `speedup_with_start` those of whole commands. `processor_ratio` is how
    much processor time `ranks` take together for what one process does in 1. Raises UserError if `novels` hold no text,
    if a command fails or if the stores differ.
    """
    books = folder / "books"
    characters = _make_corpus(novels, books, copies, others)
    start = time.perf_counter()
    train_tokenizer(_pieces(books / "giant.txt"), _VOCABULARY).save_pretrained(folder / "tokenizer")
    training = time.perf_counter() - start
    launchers = {1: [], ranks: ["mpirun", "--bind-to", "none", "--oversubscribe", "-np", str(ranks)]}
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in launchers}
    stores = set()
    for _ in range(rounds):
        for size, launcher in launchers.items():
            out = folder / f"store-{size}"
            runs[size].append(_prepare(launcher, books, folder / "tokenizer", out))
            stores.add(TokenStore.open(out).fingerprint)
    if len(stores) > 1:
        raise UserError(f"the stores of 1 and {ranks} ranks differ; their files are in {folder}")
    median = {
        size: {name: statistics.median(run[name] for run in found) for name in found[0]} for size, found in runs.items()
    }
    return {
        "ranks": ranks,
        "rounds": rounds,
        "characters": characters,
        "cores": len(os.sched_getaffinity(0)),
        "training_seconds": training,
        "seconds": {str(size): found for size, found in median.items()},
        "speedup": median[1]["steps"] / median[ranks]["steps"],
        "processor_ratio": median[ranks]["processor"] / median[1]["processor"],
        "speedup_with_start": median[1]["command"] / median[ranks]["command"],
    }


def _make_corpus(novels: Path, books: Path, copies: int, others: int) -> dict[str, int]:
    """Write the giant and the others; their lengths in characters."""
    records = (record for source in find_sources([novels], books) for record in read_records(source.path))
    text = "\n\n".join(clean(record.text).text for record in records if isinstance(record, Record))
    if not text:
        raise UserError(f"{novels} holds no text; give a folder of novels")
    giant = "\n\n".join([text] * copies)
    books.mkdir(parents=True)
    (books / "giant.txt").write_text(giant, encoding="utf-8")
    length = len(giant) // _TIMES_LONGER
    for number in range(others):
        start = number * len(giant) // others % max(1, len(giant) - length)
        (books / f"other-{number:02d}.txt").write_text(giant[start : start + length], encoding="utf-8")
    return {"giant": len(giant), "others": others * length}


def _pieces(path: Path) -> list[str]:
    """The first million characters, as the trainer likes them: in pieces."""
    text = path.read_text(encoding="utf-8")[:1_000_000]
    return [text[start : start + 10_000] for start in range(0, len(text), 10_000)]


def _prepare(launcher: list[str], books: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """Seconds of each step, of the `steps` together and of the whole `command`; `processor` time of the steps."""
    command = [*launcher, *_PREPARE, str(books), "--out", str(out), "--tokenizer", str(tokenizer)]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    whole = time.perf_counter() - start
    steps = re.findall(r"(\w+) ([\d.]+) \(([\d.]+)\)", done.stdout)
    if done.returncode or not steps:
        raise UserError(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stdout}")
    clock = {name: float(seconds) for name, seconds, _ in steps}
    processor = sum(float(seconds) for _, _, seconds in steps)
    return {**clock, "steps": sum(clock.values()), "processor": processor, "command": whole}


def main(
    novels: Annotated[Path, typer.Argument(help="Novels to make the corpus of.")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    copies: Annotated[int, typer.Option(min=1, help="How often the giant repeats the novels.")] = 2,
    others: Annotated[int, typer.Option(min=0)] = 8,
) -> None:
    """Measure and print one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(novels, Path(folder), ranks=ranks, rounds=rounds, copies=copies, others=others)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
