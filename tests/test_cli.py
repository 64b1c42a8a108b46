"""The command line: the main job through every verb, and a user's mistakes: one message, code 2, no traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hvd_novel.cli import main
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.train.run import _find_checkpoint, load_config
from hvd_novel.train.run_folder import RunFolder
from tests.conftest import MODEL, STORIES
from tests.distributed.test_resume import wait_for_step
from tests.launch import HVD_NOVEL, Finished, hvd_novel, kill, start

WriteConfig = Callable[..., Path]


def assert_mistake(finished: Finished, *parts: str) -> None:
    """Code 2, one message with `parts` in it, and no traceback. Launchers turn 2 into their own code."""
    assert finished.code == 2, finished.output
    _assert_message(finished.output, *parts)


def _assert_message(output: str, *parts: str) -> None:
    if "<stderr>:" in output:  # under horovodrun, which adds a traceback of its own when a rank fails
        output = "\n".join(line for line in output.splitlines() if "<stderr>:" in line)
    assert "Traceback" not in output, output
    assert output.count("error: ") == 1, output
    flat = " ".join(output.split())
    for part in parts:
        assert part in flat, output


@pytest.fixture(scope="module")
def finished_run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with tied embeddings, evaluation, samples and several checkpoints."""
    folder = tmp_path_factory.mktemp("cli")
    config = folder / "run.yaml"
    config.write_text(
        json.dumps(
            {
                "run": {"dir": str(folder / "run")},
                "data": {"store": str(store)},
                "model": {**MODEL, "tie_word_embeddings": True},
                "batch": {"tokens": 1500, "micro_batch_tokens": 600},
                "schedule": {"steps": 12},
                "optimizer": {"lr": 0.003},
                "compute": {"device": "cpu", "threads": 1, "gradient_checkpointing": True},
                "evaluate": {"every": 6, "max_tokens": 400},
                "sample": {"every": 6, "prompt": "第一章", "max_new_tokens": 20},
                "checkpoint": {"every": 4, "keep": 2},
            }
        ),
        encoding="utf-8",
    )
    done = hvd_novel("train", config)
    assert done.code == 0, done.output
    return folder / "run"


def test_a_run_folder_holds_what_it_should(finished_run: Path) -> None:
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = {
        kind: [r["step"] for r in records if r["kind"] == kind] for kind in ("train", "eval", "sample", "checkpoint")
    }
    assert steps == {"train": [*range(1, 13)], "eval": [6, 12], "sample": [6, 12], "checkpoint": [4, 8, 12]}
    assert sorted(p.name for p in (finished_run / "checkpoints").iterdir()) == [
        "latest",
        "step-00000008",
        "step-00000012",
    ]
    assert (finished_run / "samples" / "step-00000006.txt").read_text("utf-8").startswith("第一章")
    assert json.loads((finished_run / "status.json").read_text())["state"] == "finished"
    assert json.loads((finished_run / "environment.json").read_text())["packages"]["torch"]
    assert list((finished_run / "tensorboard").iterdir())
    evaluations = [r["bits_per_character"] for r in records if r["kind"] == "eval"]
    assert evaluations[1] < evaluations[0]


def test_a_finished_run_started_again_does_nothing(finished_run: Path) -> None:
    before = (finished_run / "metrics.jsonl").read_text("utf-8")
    again = hvd_novel("train", finished_run / "config.yaml")
    assert again.code == 0, again.output
    assert "is finished" in again.output
    assert (finished_run / "metrics.jsonl").read_text("utf-8") == before


@pytest.mark.parametrize(("launcher", "ranks"), [("plain", 1), ("mpirun", 3)])
def test_eval_is_the_same_on_any_number_of_ranks(finished_run: Path, launcher: str, ranks: int) -> None:
    done = hvd_novel("eval", finished_run, "--json", launcher=launcher, ranks=ranks)
    assert done.code == 0, done.output
    result = json.loads(re.findall(r"^\{.*\}$", done.output, re.MULTILINE)[0])
    assert result["step"] == 12
    assert result["tokens"] > 400, "the whole split, not the part evaluated during training"
    assert result["bits_per_character"] == pytest.approx(REFERENCE.setdefault("bits", result["bits_per_character"]))


REFERENCE: dict[str, float] = {}


def test_eval_prints_a_table(finished_run: Path) -> None:
    done = hvd_novel("eval", finished_run, "--step", 8)
    assert done.code == 0, done.output
    assert "bits per character" in done.output
    assert "step 8" in done.output


def test_generate_writes_the_same_text_for_the_same_seed(finished_run: Path) -> None:
    arguments = ("generate", finished_run, "--prompt", "夜里", "--genre", "科幻", "--max-new-tokens", 15, "--json")
    one, two = hvd_novel(*arguments), hvd_novel(*arguments)
    assert one.code == 0, one.output
    assert one.output == two.output
    assert json.loads(one.output)["text"]


def test_exported_model_gives_the_same_logits_in_plain_transformers(finished_run: Path, tmp_path: Path) -> None:
    done = hvd_novel("export", finished_run, "--out", tmp_path / "model", "--json")
    assert done.code == 0, done.output
    assert json.loads(done.output)["relative_logit_difference"] < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    trained = AutoModelForCausalLM.from_pretrained(finished_run / "checkpoints" / "step-00000012").eval()
    text = "<|genre_scifi|>第一章 雪落了一夜。<|chapter_sep|>"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, trained(ids).logits)
    assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight, "tied"
    assert ids[0, 0] == tokenizer.convert_tokens_to_ids("<|genre_scifi|>")
    assert ids[0, -1] == tokenizer.convert_tokens_to_ids("<|chapter_sep|>")
    assert tokenizer.decode(ids[0]) == text
    assert exported.config.eos_token_id == tokenizer.eos_token_id == exported.generation_config.eos_token_id
    assert exported.config.use_cache
    again = hvd_novel("export", finished_run, "--out", tmp_path / "model")
    assert_mistake(again, "exists and is not empty")


def test_training_goes_on_from_an_exported_model(finished_run: Path, write_config: WriteConfig, tmp_path: Path) -> None:
    assert hvd_novel("export", finished_run, "--out", tmp_path / "model").code == 0
    pretrained = {"pretrained": str(tmp_path / "model")}
    done = hvd_novel("train", write_config("tuned", model=pretrained, schedule={"steps": 2, "warmup_steps": 0}))
    assert done.code == 0, done.output
    # The first loss is a trained model's, not a new one's (ln 600 = 6.4).
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    assert first["loss"] < 6.2


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launcher", "ranks"), [("plain", 1), ("mpirun", 2), ("horovodrun --gloo", 2)])
def test_an_unknown_key_is_refused_once_by_any_launcher(write_config: WriteConfig, launcher: str, ranks: int) -> None:
    done = hvd_novel("train", write_config(optimizer={"learning_rate": 1.0}), launcher=launcher, ranks=ranks)
    assert done.code != 0
    _assert_message(done.output, "run.yaml:", "optimizer.learning_rate: unknown key")


def test_wrong_arguments_are_refused_once() -> None:
    done = hvd_novel("bench", "train", "--tokens", 1, launcher="mpirun", ranks=2)
    assert done.code == 2, done.output
    assert done.output.count("Error: Invalid value for '--tokens'") == 1, done.output
    assert "Traceback" not in done.output


def test_a_mistake_that_only_another_rank_sees_is_told_by_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Horovod runs, as where a file is missing on the second host: rank 0 would not have ended them all."""
    waited: list[float] = []
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setattr("sys.argv", ["hvd-novel", "train", str(tmp_path / "absent.yaml")])
    monkeypatch.setattr("hvd_novel.cli.time.sleep", waited.append)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert waited, "rank 0 speaks first"
    assert (
        f"error: on rank 1: the configuration file {tmp_path / 'absent.yaml'} does not exist" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("launcher", "ranks"), [("plain", 1), ("mpirun", 2), ("horovodrun --gloo", 2)])
def test_absent_cuda_is_refused_once_by_any_launcher(write_config: WriteConfig, launcher: str, ranks: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    done = hvd_novel("train", write_config(compute={"device": "cuda"}), launcher=launcher, ranks=ranks)
    assert done.code != 0
    assert done.code == 2 or launcher != "plain"
    _assert_message(done.output, "compute.device=cuda, but no CUDA device can be used", "set compute.device=cpu")


def test_a_run_folder_of_another_configuration_is_refused(finished_run: Path, tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text((finished_run / "config.yaml").read_text("utf-8"), "utf-8")
    done = hvd_novel("train", config, "optimizer.lr=0.1", "log.every=3")
    assert_mistake(done, "belongs to a run of another configuration", "optimizer.lr: 0.003 there, 0.1 now")
    assert "log.every" not in done.output, "what does not change the result may differ"


def test_a_run_on_a_changed_store_is_refused(finished_run: Path, store: Path) -> None:
    """The same path, and other novels in it by now."""
    changed = TokenStore(store, {**TokenStore.open(store).header, "fingerprint": "0" * 64})
    with pytest.raises(UserError, match="is not the one that .*step-00000012 was trained on"):
        _find_checkpoint(load_config(finished_run / "config.yaml", []), RunFolder(finished_run), changed)


def test_a_diverged_run_fails_and_says_why(write_config: WriteConfig, tmp_path: Path) -> None:
    done = hvd_novel("train", write_config(optimizer={"lr": 1e30}, schedule={"steps": 6, "warmup_steps": 0}))
    assert_mistake(done, "the loss is not finite at step 6", "lower optimizer.lr")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_two_runs_in_one_folder_are_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(schedule={"steps": 100_000})
    first = start([HVD_NOVEL, "train", str(config)])
    try:
        wait_for_step(tmp_path / "run", 1, first)
        assert_mistake(hvd_novel("train", config), "is in use by another run")
        assert first.poll() is None
    finally:
        kill(first)


def test_a_folder_that_is_no_run_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert_mistake(hvd_novel("train", write_config()), "exists and is not a run folder")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.fixture
def broken_store(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "broken"))


def test_a_corrupt_store_is_refused(broken_store: Path, write_config: WriteConfig) -> None:
    path = broken_store / "train.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = hvd_novel("train", write_config(data={"store": str(broken_store)}))
    assert_mistake(done, "train.arrow", "run hvd-novel prepare again")


def test_a_store_with_another_tokenizer_is_refused(broken_store: Path, write_config: WriteConfig) -> None:
    path = broken_store / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("chapter_sep", "chapter_xxx"), "utf-8")
    done = hvd_novel("train", write_config(data={"store": str(broken_store)}))
    assert_mistake(done, "tokenizer")


def test_an_absent_store_is_refused_by_every_rank(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(data={"store": str(tmp_path / "absent")})
    done = hvd_novel("train", config, launcher="mpirun", ranks=2)
    assert done.code != 0
    _assert_message(done.output, str(tmp_path / "absent"))


def test_a_pretrained_model_with_another_tokenizer_is_refused(
    finished_run: Path, tmp_path: Path, write_config: WriteConfig
) -> None:
    assert hvd_novel("export", finished_run, "--out", tmp_path / "model").code == 0
    other = tmp_path / "other"
    made = hvd_novel(
        "prepare", STORIES, "--out", other, "--vocab-size", 700, "--max-len", 256, "--min-len", 32, "--overlap", 16
    )
    assert made.code == 0, made.output
    config = write_config(data={"store": str(other)}, model={"pretrained": str(tmp_path / "model")})
    assert_mistake(hvd_novel("train", config), "made with another tokenizer", f"--tokenizer {tmp_path / 'model'}")


def test_mistakes_of_prepare(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "useless").mkdir()
    (tmp_path / "useless" / "blank.txt").write_text("\n\n  \n")
    (tmp_path / "novel.txt").write_text("第一章\n雨。\n" * 200, "utf-8")
    out = tmp_path / "out"
    assert_mistake(hvd_novel("prepare", tmp_path / "absent", "--out", out), "absent")
    assert_mistake(hvd_novel("prepare", tmp_path / "empty", "--out", out), "empty")
    assert_mistake(hvd_novel("prepare", tmp_path / "useless", "--out", out), "useless")
    done = hvd_novel("prepare", tmp_path / "novel.txt", "--out", out, "--tokenizer", tmp_path / "empty")
    assert_mistake(done, "tokenizer")
    assert not out.exists()


def test_mistakes_with_runs(finished_run: Path, tmp_path: Path) -> None:
    assert_mistake(hvd_novel("eval", tmp_path / "absent"), "is not a run folder")
    assert_mistake(hvd_novel("generate", finished_run, "--step", 5), "no checkpoint of step 5", "there are: 8, 12")
    assert_mistake(hvd_novel("generate", finished_run, "--genre", "cooking"), "no genre 'cooking'")
    assert_mistake(hvd_novel("generate", finished_run, "--temperature", "1e-9"), "temperature")


def test_help_of_every_verb() -> None:
    for verb in ([], ["prepare"], ["train"], ["eval"], ["generate"], ["export"]):
        done = hvd_novel(*verb, "--help")
        assert done.code == 0, done.output
        assert "Usage" in done.output
    keys = hvd_novel("train", "--keys")
    assert keys.code == 0, keys.output
    for part in ("optimizer.lr", "0.0003", "batch.micro_batch_tokens", "(required)", "model.*"):
        assert part in keys.output
    assert keys.output.isascii(), "lines that mpirun may cut inside a character"
    assert hvd_novel("--version").output.startswith("hvd-novel ")
