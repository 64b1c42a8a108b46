"""``hvd-novel advise`` on two ranks, and on a process that has only heard of a network."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd_novel.train.advise_views import render
from hvd_novel.tuning.schemes import SAFE, SCHEMES
from tests.launch import hvd_novel


def found(output: str) -> dict[str, Any]:
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def rendered(report: dict[str, Any]) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.timeout(300)
def test_two_ranks_predict_and_measure(write_config: Callable[..., Path], tmp_path: Path) -> None:
    config = write_config(optimizer={"name": "adamw"}, compression={"name": "auto"})
    arguments = ("--ranks", "8", "--mbit", "100", "--turns", "1", "--json")
    done = hvd_novel("advise", config, *arguments, launcher="mpirun", ranks=2)
    assert done.code == 0, done.output
    report = found(done.output)
    assert report["ranks"] == 2
    rows = {row["scheme"]: row for row in report["schemes"]}
    assert rows.keys() == SCHEMES.keys()
    assert rows["none"]["bytes_sent"] == 4 * report["parameters"]
    assert rows["fp16"]["bytes_sent"] == 2 * report["parameters"] + 4
    for row in rows.values():
        spent = report["work"]["seconds"] + row["coding"] + row["wire"] - row["hidden"]
        assert row["predicted"] == pytest.approx(spent)
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["safe"] == (row["scheme"] in SAFE)
    assert report["recommended"] in SAFE
    elsewhere = {(row["ranks"], row["mbit"], row["scheme"]): row for row in report["elsewhere"]}
    assert elsewhere.keys() == {(8, mbit, scheme) for mbit in (None, 100.0) for scheme in SCHEMES}
    assert elsewhere[8, 100.0, "none"]["bytes_sent"] == pytest.approx(2 * 7 / 8 * 4 * report["parameters"], rel=1e-3)
    text = rendered(report)
    assert f"recommended: {report['recommended']}" in text
    assert "compression: {name: " in text
    assert "this network" in text
    assert not (tmp_path / "run").exists(), "advice leaves no run behind"


@pytest.mark.timeout(300)
def test_one_process_can_predict_for_a_network(write_config: Callable[..., Path]) -> None:
    config = write_config()
    alone = hvd_novel("advise", config)
    assert alone.code == 2
    assert "one process exchanges nothing" in alone.output
    done = hvd_novel("advise", config, "--mbit", "10", "--mbit", "1e6", "--latency-ms", "2", "--ranks", "16", "--json")
    assert done.code == 0, done.output
    report = found(done.output)
    assert (report["link"], report["schemes"], report["recommended"]) == (None, [], None)
    slow, fast = ({r["scheme"]: r for r in report["elsewhere"] if r["mbit"] == mbit} for mbit in (10.0, 1e6))
    work, bits = report["work"]["seconds"], 8 * slow["none"]["bytes_sent"]
    exchange = 0.002 + bits / 1e7 - report["work"]["overlapping"]  # it lasts longer than what can hide it
    assert slow["none"]["seconds"] == pytest.approx(work + slow["none"]["coding"] + exchange)
    assert all(slow[scheme]["seconds"] >= fast[scheme]["seconds"] for scheme in SCHEMES)
    assert slow["onebit"]["seconds"] < slow["none"]["seconds"]


def test_packs_of_a_size_unknown_are_refused(write_config: Callable[..., Path]) -> None:
    done = hvd_novel("advise", write_config(batch={"micro_batch_tokens": "auto"}), "--mbit", "100")
    assert done.code == 2
    assert "batch.micro_batch_tokens=auto is found by trial" in done.output
