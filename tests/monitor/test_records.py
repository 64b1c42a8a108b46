"""Sinks: what is written, and what a resumed run finds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hvd_novel.monitor.console import ConsoleSink, duration, short
from hvd_novel.monitor.records import MetricsFile, TensorBoard


def train(step: int, **values: float) -> dict:
    record = {
        "kind": "train",
        "step": step,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "epoch": 0.5,
        "tokens": 100,
        "trained_tokens": 90,
        "total_trained_tokens": 90 * step,
        "packs": 2,
        "bytes_sent": 2000,
        "compression_ratio": 32.0,
        "seconds": 0.5,
        "tokens_per_second": 200.0,
        "memory_bytes": 2**30,
        "updated": 1,
    }
    return record | values


def test_metrics_are_lines_of_json_without_nan(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "metrics.jsonl", 0)
    sink.emit(train(1, loss=float("nan")))
    sink.emit(train(2, loss=float("inf")))
    sink.emit({"kind": "sample", "step": 2, "text": "雨停了"})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.get("loss") for line in lines] == [None, None, None]
    assert lines[2]["text"] == "雨停了"


def test_steps_that_will_be_trained_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"kind": "train", "step": s}) + "\n" for s in range(1, 6)) + 'garbage\n{"kind": "tr'
    )
    MetricsFile(path, 3).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, 0)
    sink.emit(train(1, loss=3.0))
    sink.emit(train(2, loss=2.5))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]


def test_a_line_per_interval_with_means_weighted_by_tokens() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=200), first_step=0, steps=20, every=10, bar=False)
    for step in range(1, 11):
        sink.emit(train(step, loss=float(step), trained_tokens=90 if step < 10 else 180))
    sink.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "the first step and the tenth"
    assert lines[0].startswith("step 1/20 | loss 1.0000")
    mean = (sum(range(2, 10)) * 90 + 10 * 180) / (8 * 90 + 180)
    assert f"step 10/20 | loss {mean:.4f} | grad norm 1.000 | lr 1.00e-03 | 200 tokens/s" in lines[1]
    assert lines[1].endswith("eta 5s")


def test_steps_left_out_are_said() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=200), first_step=0, steps=2, every=1, bar=False)
    sink.emit(train(1, updated=0))
    sink.close()
    assert "1 steps left out: gradient not finite" in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(7, "7s"), (65, "1m05s"), (3725, "1h02m"), (0, "0s")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (1234, "1.23K"), (1234567, "1.23M"), (0, "0"), (2e12, "2T")])
def test_short(number: float, text: str) -> None:
    assert short(number) == text


def test_a_terminal_shows_a_bar_and_the_same_lines() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=120, force_terminal=True), first_step=0, steps=20, every=10, bar=True)
    for step in range(1, 11):
        sink.emit(train(step))
    sink.close()
    assert "step 10/20 | loss 2.0000" in out.getvalue()
    assert "10/20" in out.getvalue().replace("step 10/20", "")
    assert "eta 5s" in out.getvalue()
