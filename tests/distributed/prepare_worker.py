"""Run by every rank: prepare several corpora, one after the other; the last is a mistake that all ranks are told of.

Arguments: the folder to write into, the mixed corpus, a single file, and a file that cannot be used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hvd_novel import comm
from hvd_novel.corpus import pieces
from hvd_novel.corpus.prepare import prepare
from hvd_novel.corpus.ranks import Ranks
from hvd_novel.errors import UserError
from tests.corpus.corpora import OPTIONS

folder, books, single, useless = map(Path, sys.argv[1:])
pieces._PIECE_CHARACTERS = 5000
crew = Ranks()
done: list[str] = []
reports = [
    prepare([source], folder / name, **OPTIONS, crew=crew, progress=done.append)
    for name, source in (("mixed", books), ("single", single))
]
assert len(set(comm.all_gather_object(reports[0].model_dump_json(), "reports"))) == 1
files = [line for lines in comm.all_gather_object(done, "lines") for line in lines if line.startswith("file ")]
assert sorted(files) == sorted(set(files)), "a file was read twice"
assert len(files) == reports[0].totals.files + 1
try:
    prepare([useless], folder / "mixed", **OPTIONS, crew=crew)
except UserError as error:
    message = str(error)
assert set(comm.all_gather_object(message, "messages")) == {message}
if crew.rank == 0:
    (folder / "message").write_text(message, encoding="utf-8")
comm.leave(0)
