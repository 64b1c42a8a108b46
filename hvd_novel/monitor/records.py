"""Records of a run and where they go.

A record is a flat dict with ``kind`` and ``step`` (completed optimizer steps). Kinds and their keys:

| kind       | keys                                                                                          |
|------------|-----------------------------------------------------------------------------------------------|
| train      | loss (nats per trained token, all ranks), grad_norm (before clipping), lr, epoch (fraction),  |
|            | tokens and trained_tokens (this step, all ranks), total_trained_tokens, packs (all ranks),    |
|            | bytes_sent (gradients on the wire, all ranks), compression_ratio (bytes of a fp32 ring        |
|            | allreduce / bytes sent; 1 on one rank),                                                       |
|            | seconds, data_seconds (of them spent waiting for packs, mean over ranks), tokens_per_second   |
|            | (all ranks), memory_bytes (peak, this rank), updated (0: the gradient was not finite and the  |
|            | step left the parameters alone)                                                               |
| eval       | loss, perplexity, bits_per_token, bits_per_character, tokens, characters, seconds             |
| sample     | prompt, genre, text                                                                           |
| ledger     | epoch (just ended), documents, empty_documents, tokens (of the store) = trained + masked +    |
|            | truncated + carried (the last two are 0), unexplained (0)                                     |
| checkpoint | path, seconds                                                                                 |
| compression| (under `auto`) name (in force), how (it was chosen), and by the name of each scheme looked at: |
|            | seconds of a step                                                                             |

Numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hvd_novel.files import replace_text

Record = Mapping[str, Any]


class Sink(Protocol):
    """Somewhere that records go, on rank 0."""

    def emit(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Write what is still held back."""


class MetricsFile:
    """``metrics.jsonl``: one record a line, flushed at once."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open for appending. Lines after `resumed_step`, which will be trained again, are dropped."""
        if path.exists():
            kept = [record for record in _records(path) if record["step"] <= resumed_step]
            replace_text(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def emit(self, record: Record) -> None:
        """Append `record`."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars under ``{kind}/{key}`` and samples as text."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and not always wanted

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def emit(self, record: Record) -> None:
        """Write the numbers of `record`, or its text."""
        kind, step = record["kind"], record["step"]
        for key, value in record.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{key}", value, step)
        if kind == "sample":
            self._writer.add_text("sample", record["text"], step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _line(record: Record) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"


def _records(path: Path) -> list[Any]:
    """The records of the file; half a line that a killed process left, or one that is damaged, is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]
