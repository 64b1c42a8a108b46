"""The benchmark of the exchange."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_novel.bench.coding import CODECS, passes
from tests.launch import hvd_novel


@pytest.mark.timeout(300)
def test_exchanges_on_two_ranks(tmp_path: Path) -> None:
    done = hvd_novel(
        *("bench", "comm", "--elements", "1500000", "--bucket", "1", "--bucket", "8", "--steps", "1"),
        *("--scheme", "none", "--scheme", "fp16", "--scheme", "onebit", "--json"),
        *("--plot", str(tmp_path / "exchange.png")),
        launcher="mpirun",
        ranks=2,
    )
    assert done.code == 0, done.output
    report = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    assert (report["ranks"], report["elements"]) == (2, 1_500_000)
    assert report["bytes_per_second"] > 0
    rows = {(row["scheme"], row["bucket_mib"]): row for row in report["exchanges"]}
    assert len(rows) == 6
    for mib in (1.0, 8.0):
        assert rows["none", mib]["against_none"] == 1.0
        assert rows["none", mib]["bytes_sent"] == 4 * 1_500_000
        assert rows["fp16", mib]["bytes_sent"] == pytest.approx(2 * 1_500_000, rel=1e-4)
        assert rows["onebit", mib]["bytes_sent"] == pytest.approx(1_500_000 / 8, rel=1e-2)
        # In and out: gradients; with error feedback as large a residual, and that of the half of it that a rank owns.
        assert rows["none", mib]["memory_bytes"] == rows["fp16", mib]["memory_bytes"] == 8 * 1_500_000
        assert rows["onebit", mib]["memory_bytes"] == 8 * 1_500_000 * (1 + 1 + 1 / 2)
    for row in rows.values():
        assert min(row["seconds"], row["wire_seconds"], row["predicted"]) > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["seconds"] - 1)
        assert row["memory_seconds"] == pytest.approx(row["memory_bytes"] / report["copy_bytes_per_second"])
        assert row["share"] == pytest.approx(max(row["wire_seconds"], row["memory_seconds"]) / row["seconds"])
    assert (tmp_path / "exchange.png").read_bytes().startswith(b"\x89PNG")
    assert report["coding"].keys() == {"copy", *CODECS}


def test_mistakes() -> None:
    alone = hvd_novel("bench", "comm")
    assert alone.code == 2
    assert "start this under a launcher" in alone.output
    unknown = hvd_novel("bench", "comm", "--scheme", "telepathy")
    assert unknown.code == 2
    assert "no scheme is called telepathy" in unknown.output
    single = hvd_novel("bench", "comm", launcher="mpirun", ranks=1)
    assert single.code == 2
    assert "one rank exchanges nothing" in single.output
    huge = hvd_novel("bench", "comm", "--elements", "1000000000000", launcher="mpirun", ranks=2)
    assert huge.code == 2
    assert "1,000,000,000,000 elements need about" in huge.output
    assert "give fewer --elements" in huge.output
    endless = hvd_novel("bench", "comm", "--bucket", "inf")
    assert endless.code == 2
    assert "Invalid value for '--bucket'" in endless.output


def test_coding_counts_copies() -> None:
    for name, row in passes(100_000, 3).items():
        if name != "copy":
            assert row["both"] == pytest.approx(row["encode"] + row["decode"])
            assert row["decode"] > 0
