"""The convergence benchmark: what it runs, what it keeps, what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_novel.bench import tradeoff
from hvd_novel.bench.convergence import SCHEMES, Run, summary
from hvd_novel.train.run import load_config
from tests.launch import hvd_novel

WriteConfig = Callable[..., Path]
LAUNCHER = "mpirun --oversubscribe --bind-to none -np 2"


def test_settings_of_every_scheme_are_a_configuration(write_config: WriteConfig) -> None:
    path = write_config()
    counts = {"warm_up": 3, "ramp": 2, "beta1": 0.9}
    for scheme in SCHEMES.values():
        load_config(path, [setting.format(**counts) for setting in scheme.settings])


@pytest.mark.timeout(300)
def test_two_schemes(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(schedule={"steps": 3, "warmup_steps": 1})
    arguments = ["bench", "convergence", config, "--out", tmp_path / "out", "--seeds", 1, "--launcher", LAUNCHER]
    done = hvd_novel(*map(str, arguments), "--scheme", "onebit-adam", "--json", "--plot", str(tmp_path / "curves.png"))
    assert done.code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    dense, onebit = found["summary"]
    assert (dense["scheme"], dense["against_dense"], dense["times_fewer_bytes"]) == ("none", 0.0, 1.0)
    assert onebit["scheme"] == "onebit-adam"
    assert 1.5 < onebit["times_fewer_bytes"] < 3, "one dense step of three, and small tensors travel densely"
    assert all(run["curve"][-1][0] == 3 and len(run["seconds"]) == 3 and run["ranks"] == 2 for run in found["runs"])
    assert found["tradeoff"]["schemes"]["none"]["loss_at_seconds"] is None, "dense has not come to its first evaluation"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    # Finished runs are not repeated, and not taken for those of another configuration.
    again = hvd_novel(*map(str, arguments), "--scheme", "onebit-adam", "--launcher", "/bin/false", "--json")
    assert again.code == 0, again.output
    assert json.loads(again.output.splitlines()[-1]) == found
    other = hvd_novel(*map(str, arguments), "batch.tokens=1000")
    assert other.code == 2
    assert "belongs to a run of another configuration" in other.output


def test_mistakes(write_config: WriteConfig, tmp_path: Path) -> None:
    common = ["bench", "convergence", str(write_config()), "--out", str(tmp_path / "out")]
    unknown = hvd_novel(*common, "--scheme", "telepathy")
    assert unknown.code == 2
    assert "no scheme is called telepathy; there are none, fp16, int8" in unknown.output
    failing = hvd_novel(*common, "--launcher", "/bin/false")
    assert failing.code == 2
    assert "a training run of the benchmark failed with code 1" in failing.output


def test_summary_compares_means_of_seeds() -> None:
    runs = [
        Run(scheme, seed, 0.1, loss, sent, 100, [(1, loss, sent)], 2, [0.1])
        for scheme, sent, losses in (("none", 100, (2.0, 4.0)), ("int8", 25, (3.0, 3.6)))
        for seed, loss in enumerate(losses)
    ]
    dense, int8 = summary(runs)
    assert (dense["loss"], dense["lowest"], dense["highest"]) == (3.0, 2.0, 4.0)
    assert int8["against_dense"] == pytest.approx(0.1)
    assert int8["times_fewer_bytes"] == 4.0


def _run(scheme: str, losses: tuple[float, float, float], sent: int) -> Run:
    """Evaluated at steps 10, 20 and 30, with `sent` bytes in 10 steps, on 2 ranks."""
    curve = [(10 * (i + 1), loss, sent * (i + 1)) for i, loss in enumerate(losses)]
    return Run(scheme, 1, 0.1, losses[-1], 3 * sent, 0, curve, 2, [0.2] * 9 + [9.0])


def test_tradeoff_at_equal_bytes_and_time() -> None:
    runs = [
        _run("none", (4.0, 3.0, 2.0), 2000),
        _run("int8", (4.0, 3.0, 2.04), 500),
        _run("topk", (5.0, 4.0, 3.0), 200),
    ]
    link = tradeoff.Link(bytes_per_second=100, step_seconds=tradeoff.step_seconds(runs))
    assert link.step_seconds == pytest.approx(0.2)
    found = tradeoff.compare(runs, link)
    assert (found["bytes"], found["seconds"]) == (600, pytest.approx(30 * 0.2 + 600 / 2 / 100))
    assert found["target"] == pytest.approx(2.04)
    none, int8, topk = (found["schemes"][name] for name in ("none", "int8", "topk"))
    assert none["loss_at_bytes"] is None, "2000 bytes were sent before it was first evaluated"
    assert int8["loss_at_bytes"] == pytest.approx(3.8)
    assert topk["loss_at_bytes"] == topk["loss_at_seconds"] == 3.0
    assert int8["loss_at_seconds"] == pytest.approx(3.0), "9 seconds are 20 steps of 0.2 and 0.25 seconds"
    assert int8["target_seconds"] == pytest.approx(30 * 0.2 + 1500 / 200)
    assert none["target_bytes"] == pytest.approx(6000 - 0.04 * 2000)
    assert topk["target_seconds"] is topk["target_bytes"] is None
    tradeoff.table(found)
