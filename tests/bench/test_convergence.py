"""The convergence benchmark: what it runs, what it keeps, what it says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvd_novel.bench import convergence, tradeoff
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
    arguments += ["--mbit", 100, "--mbit", 50]
    done = hvd_novel(*map(str, arguments), "--scheme", "onebit-adam", "--json", "--plot", str(tmp_path / "curves.png"))
    assert done.code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    dense, onebit = found["summary"]
    assert (dense["scheme"], dense["against_dense"], dense["times_fewer_bytes"]) == ("none", 0.0, 1.0)
    assert onebit["scheme"] == "onebit-adam"
    assert 1.5 < onebit["times_fewer_bytes"] < 3, "one dense step of three, and small tensors travel densely"
    assert all(run["curve"][-1][0] == 3 and len(run["seconds"]) == 3 and run["ranks"] == 2 for run in found["runs"])
    fast, slow = found["tradeoff"]
    assert (fast["link"]["bytes_per_second"], slow["link"]["bytes_per_second"]) == (100e6 / 8, 50e6 / 8)
    assert fast["rows"][0]["loss_at_seconds"] is None, "dense has not come to its first evaluation"
    assert fast["rows"][1]["times_dense"] < slow["rows"][1]["times_dense"], "the slower the link, the more it pays"
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


def test_every_scheme_trains_with_every_factor(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[str, str] = {}

    def train(config: Path, settings: Sequence[str], launcher: str) -> None:
        given = dict(setting.split("=", 1) for setting in settings)
        trained[Path(given["run.dir"]).name] = given["optimizer.lr"]

    def read(folder: Path, scheme: str, seed: int, lr: float, factor: float) -> Run:
        loss = 2.0 + abs(lr - 1e-3)
        return Run(scheme, seed, lr, loss, 1, 1, [(3, loss, 1)], 2, [0.1], factor)

    monkeypatch.setattr(convergence, "_train", train)
    monkeypatch.setattr(convergence, "_is_finished", lambda folder, config: folder.name in trained)
    monkeypatch.setattr(convergence, "read", read)
    said: list[str] = []
    runs = convergence.convergence(
        write_config(),
        [],
        out=tmp_path,
        schemes=["int8"],
        seeds=2,
        rates=[5e-4, 1e-3, 2e-3],
        factors=[2.0, 1.3, 1.0],
        launcher="",
        say=said.append,
    )
    tuning = {f"none-lr{lr}-seed1": lr for lr in ("0.0005", "0.001", "0.002")}
    every = itertools.product(("none", "int8"), ("0.001", "0.002", "0.0013"), (1, 2))
    assert trained == tuning | {f"{scheme}-lr{lr}-seed{seed}": lr for scheme, lr, seed in every}
    rows = [(row["scheme"], row["lr"], row["lr_factor"], row["seeds"]) for row in summary(runs)]
    rates = [(0.001, 1.0, 2), (0.002, 2.0, 2), (0.0013, 1.3, 2)]
    assert rows == [(scheme, *rate) for scheme in ("none", "int8") for rate in rates]


def test_rates_are_kept_apart(tmp_path: Path) -> None:
    runs = [
        _run("none", (4.0, 3.0, 2.0), 2000),
        _run("none", (4.0, 3.0, 2.5), 2000, factor=2.0),
        _run("onebit-adam", (4.0, 3.0, 2.2), 500),
        _run("onebit-adam", (4.0, 3.0, 2.1), 500, factor=2.0),
    ]
    rows = summary(runs)
    onebit = SCHEMES["onebit-adam"].explanation
    assert [row["label"] for row in rows] == ["dense AdamW", "dense AdamW, rate x 2", onebit, f"{onebit}, rate x 2"]
    assert [row["against_dense"] for row in rows] == pytest.approx([0.0, 0.25, 0.1, 0.05]), "the tuned rate counts"
    link = tradeoff.Link(bytes_per_second=100, step_seconds=0.2)
    compared = tradeoff.compare(runs, link)
    assert [row["label"] for row in compared["rows"]] == [row["label"] for row in rows]
    assert compared["target"] == pytest.approx(2.04), "2 % above dense with the tuned rate, not the mean of both"
    tradeoff.plot(runs, link, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def _run(scheme: str, losses: tuple[float, float, float], sent: int, factor: float = 1.0) -> Run:
    """Evaluated at steps 10, 20 and 30, with `sent` bytes in 10 steps, on 2 ranks."""
    curve = [(10 * (i + 1), loss, sent * (i + 1)) for i, loss in enumerate(losses)]
    return Run(scheme, 1, 0.1 * factor, losses[-1], 3 * sent, 0, curve, 2, [0.2] * 9 + [9.0], factor)


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
    none, int8, topk = found["rows"]
    assert none["loss_at_bytes"] is None, "2000 bytes were sent before it was first evaluated"
    assert int8["loss_at_bytes"] == pytest.approx(3.8)
    assert topk["loss_at_bytes"] == topk["loss_at_seconds"] == 3.0
    assert int8["loss_at_seconds"] == pytest.approx(3.0), "9 seconds are 20 steps of 0.2 and 0.25 seconds"
    assert int8["target_seconds"] == pytest.approx(30 * 0.2 + 1500 / 200)
    assert none["target_bytes"] == pytest.approx(6000 - 0.04 * 2000)
    assert topk["target_seconds"] is topk["target_bytes"] is topk["times_dense"] is None
    dense_seconds = 29.6 * 0.2 + 5920 / 200
    assert none["times_dense"] == 1.0
    assert int8["times_dense"] == pytest.approx(dense_seconds / 13.5)
    assert none["times_fp16"] is int8["times_fp16"] is None, "fp16 was not run"
    fp16 = [_run("fp16", (4.0, 3.0, 2.0), 1000), _run("fp16", (2.0, 2.0, 2.0), 1000, factor=2.0)]
    against = tradeoff.compare([*runs, *fp16], link)["rows"]
    assert against[1]["times_fp16"] == pytest.approx((29.6 * 0.2 + 2960 / 200) / 13.5), "fp16 with the tuned rate"
    assert [row["times_fp16"] for row in against if row["scheme"] == "fp16"] == [1.0, pytest.approx(20.72 / 7)]
    tradeoff.table(found)
