"""The command line: ``hvd-novel prepare | train | launch | eval | generate | export | plan | advise | bench``.

Exit codes: 0 done, 1 failure, 2 a mistake of the user's (one message, no traceback), 75 stopped by a signal after
saving (start the same command again to go on).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console

from hvd_novel import __version__
from hvd_novel.arguments import MOST, MOST_MIB, AsJson, ConfigFile, Overrides
from hvd_novel.bench.commands import app as bench
from hvd_novel.errors import UserError
from hvd_novel.launcher import launched, launched_rank
from hvd_novel.screen import WIDE, console

if TYPE_CHECKING:
    from hvd_novel.corpus.crew import Crew

OK, FAILURE, MISTAKE, REQUEUE, INTERRUPTED = 0, 1, 2, 75, 130
_PATIENCE = 10.0  # seconds

app = typer.Typer(
    name="hvd-novel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Train language models that write novels, on any number of ranks.

    A run in five lines:

    * `hvd-novel prepare novels/ --out store`
    * `horovodrun -np 2 hvd-novel train examples/quickstart.yaml data.store=store run.dir=runs/first`
    * `hvd-novel eval runs/first`
    * `hvd-novel generate runs/first --prompt 第一章`
    * `hvd-novel export runs/first --out model`
    """,
)
app.add_typer(bench, name="bench")
err = Console(stderr=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (`run.dir` of the training configuration).")]
Step = Annotated[Optional[int], typer.Option(help="Checkpoint to use; default: the newest whole one.")]  # noqa: UP045
Device = Annotated[Optional[str], typer.Option(help="cpu or cuda; default: as in the run.")]  # noqa: UP045


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hvd-novel {__version__}")
        raise typer.Exit


def _print_keys(wanted: bool) -> None:
    if wanted:
        from hvd_novel.config.describe import describe

        for table in describe():
            console().print(table)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


@app.command()
def prepare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Novels, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Token store to make; an old one is replaced when the new is whole.")],
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Hugging Face tokenizer folder; default: train a byte-level BPE on the corpus."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=300, help="Vocabulary of the BPE trained here.")] = 8192,
    max_len: Annotated[int, typer.Option(help="Longest sample, in tokens.")] = 4096,
    min_len: Annotated[int, typer.Option(help="Shorter pieces are joined to a neighbour, in tokens.")] = 128,
    overlap: Annotated[int, typer.Option(help="Context repeated between windows, in tokens; not trained.")] = 128,
    validation_fraction: Annotated[float, typer.Option(min=0, max=0.5, help="Share of chapters held out.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Draws the chapters held out.")] = 42,
    as_json: AsJson = False,
) -> None:
    """Turn novels into a token store.

    Reads .txt (UTF-8, UTF-16, GB18030, Big5), .json, .jsonl, .parquet and .epub; splits chapters; trains a
    tokenizer or uses yours; ends with a report in which every character is accounted for.

    Works under `mpirun` and `horovodrun` too: the ranks share the work, and the store is the same.
    """
    from hvd_novel.corpus.prepare import prepare as run
    from hvd_novel.corpus.report import render

    crew = _crew()
    report = run(
        paths,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_len=max_len,
        min_len=min_len,
        overlap=overlap,
        validation_fraction=validation_fraction,
        seed=seed,
        progress=_log,
        crew=crew,
    )
    if crew.rank > 0:
        return
    if as_json:
        print((out / "report.json").read_text(encoding="utf-8"))
    else:
        render(report, console())
        print(f"token store: {out}")


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    keys: Annotated[
        bool, typer.Option("--keys", callback=_print_keys, is_eager=True, help="Print every key of CONFIG and exit.")
    ] = False,
) -> None:
    """Train a model; start the same command again to resume.

    Alone it runs on one process; under `horovodrun` or `mpirun` on all ranks. SIGTERM, SIGUSR1 or Ctrl-C finishes
    the step, saves, and exits with code 75.
    """
    from hvd_novel.train.run import load_config
    from hvd_novel.train.run import train as run

    finished = run(load_config(config, overrides or []), console())
    raise typer.Exit(OK if finished else REQUEUE)


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Launcher and program, as typed alone.")],
    path: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="as-given, tcp:INTERFACE or rdma:PORT (repeat it); default: all that this host has."),
    ] = None,
    mib: Annotated[
        float, typer.Option(min=0.001, max=MOST_MIB, help="MiB of gradients in the exchange that is to be fast.")
    ] = 25,
    timeout: Annotated[float, typer.Option(min=1, max=MOST, help="Seconds after which a path is given up.")] = 120,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and print the command instead.")] = False,
) -> None:
    """Start a job on the fastest network path: `hvd-novel launch -- mpirun -np 4 hvd-novel train CONFIG.yaml`.

    Tries each path by a short job of the same launcher on the same hosts, leaves out those that do not work, tells the
    choice and why, and becomes the command. On a single host it stays as given. Paths are explained in
    `hvd_novel/paths/templates.py`.
    """
    import shlex

    from hvd_novel import comm
    from hvd_novel.paths import templates
    from hvd_novel.paths.command import Command, become
    from hvd_novel.paths.fastest import fastest

    if launched():
        raise UserError("hvd-novel launch stands before mpirun or horovodrun, not after it")
    job = Command.parse(command)
    nccl = comm.nccl_built()
    names = dict.fromkeys(path or templates.here(job.launcher, nccl=nccl))
    paths = [templates.named(name, job.launcher, nccl=nccl) for name in names]
    found = fastest(job, paths, mib=mib, timeout=timeout, network_only=path is None, say=_log)
    words = found.of(job)
    if dry_run:
        print(shlex.join(words))
    else:
        become(words)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to plan for; none of them is started.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps to plan, from the run's first; at most all of them.")] = 200,
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", metavar="FILE.png", help="Write lengths, and the balance of each step, as a picture."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Foresee how evenly ranks will be loaded, with each sharding strategy, and what padding would cost.

    Needs one process and no weights: costs are the FLOP of the model's dimensions. Keys of the JSON object are
    explained in `hvd_novel/train/plan_report.py`.
    """
    from hvd_novel.train.plan_report import plan_report
    from hvd_novel.train.plan_views import plot, render
    from hvd_novel.train.run import load_config

    report = plan_report(load_config(config, overrides or []), ranks=ranks, steps=steps)
    if picture:
        plot(report, picture)
    if as_json:
        print(json.dumps(report))
    else:
        render(report, console())


@app.command()
def advise(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[list[int], typer.Option(min=2, help="Ranks to predict for (repeat it).")] = [8, 64, 512, 4096],  # noqa: B006
    mbit: Annotated[
        Optional[list[float]],  # noqa: UP045
        typer.Option(min=0.001, max=MOST, help="Megabits a second of a network to predict for (repeat it)."),
    ] = None,
    latency_ms: Annotated[
        float,
        typer.Option(min=0, max=MOST, help="Of a round there, where a process alone has none to measure."),
    ] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Measured steps of each compressor, taken in turns.")] = 3,
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Take no steps to compare with.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what each compressor would make of a step, and recommend one.

    Under `mpirun` or `horovodrun` on the cluster that is to train: times packs, network and coding, predicts a step by
    a cost model, and compares it with steps. Nothing is learned, and `run.dir` is not touched. Keys of the JSON object
    are explained in `hvd_novel/train/advise.py`.
    """
    from hvd_novel.train.advise import advise as run
    from hvd_novel.train.advise_views import render
    from hvd_novel.train.run import load_config

    found = run(
        load_config(config, overrides or []),
        ranks=ranks,
        mbit=mbit or [],
        latency=latency_ms / 1000,
        turns=0 if predict_only else turns,
        say=_log if launched_rank() == 0 else lambda line: None,
    )
    if found and as_json:
        print(json.dumps(found))
    elif found:
        render(found, console(least=WIDE))


@app.command("eval")
def evaluate(run: Run, step: Step = None, device: Device = None, as_json: AsJson = False) -> None:
    """Measure a run's model on the validation split, beside a unigram model.

    Works under `horovodrun` and `mpirun` too: samples are dealt to the ranks, and the result is the same.
    """
    from hvd_novel.train.finished import evaluate_run

    result = evaluate_run(run, step=step, device=device)
    if result is None:  # not rank 0
        return
    if as_json:
        print(json.dumps(result))
        return
    _table(
        f"validation split at step {result['step']}",
        {
            "tokens": f"{result['tokens']:,}",
            "characters": f"{result['characters']:,}",
            "loss (nats/token)": f"{result['loss']:.4f}",
            "perplexity": f"{result['perplexity']:.2f}",
            "bits per token": f"{result['bits_per_token']:.4f}",
            "bits per character": f"{result['bits_per_character']:.4f}",
            "unigram model, bits per character": f"{result['unigram_bits_per_character']:.4f}",
            "below the unigram model": f"{result['below_unigram']:.1%}",
        },
    )


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue; `<|chapter_sep|>` may stand in it.")] = "",
    genre: Annotated[
        str, typer.Option(help="fantasy, romance, urban, scifi, ... (aliases such as 玄幻 work)")
    ] = "unknown",
    temperature: Annotated[float, typer.Option(min=0, max=MOST, help="0 takes the most likely token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the probability drawn from.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    step: Step = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Let a run's model write."""
    from hvd_novel.train.finished import generate_from_run
    from hvd_novel.train.generate import Sampling

    text = generate_from_run(
        run,
        prompt=prompt,
        genre=genre,
        sampling=Sampling(max_new_tokens, temperature, top_p, seed),
        step=step,
        device=device,
    )
    print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) if as_json else prompt + text)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder to make; must not hold anything yet.")],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder.

    It loads with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`; this is tried, and
    the logits are compared, before the folder gets its name.
    """
    from hvd_novel.train.finished import export_run

    used, difference = export_run(run, out, step=step)
    if as_json:
        print(json.dumps({"out": str(out), "step": used, "relative_logit_difference": difference}))
    else:
        print(f"exported step {used} to {out} (checked: its logits are the run's, to {difference:.1e})")


def main() -> None:
    """Entry point: turns UserError into one message, the same exit code on every rank, and no traceback."""
    try:
        code = app(standalone_mode=False) or OK
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        _leave(code)
    except typer.TyperException as error:  # arguments that are not known, or of another kind
        show = error.show  # type: ignore[attr-defined]  # all that parsing raises have it
        _give_up(lambda where: show())
    except UserError as error:
        message = str(error)
        _give_up(lambda where: _complain(where + message))
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not _is_lost_rank(error):
            raise
        _complain("another rank has stopped; its own message tells why. What was saved before is untouched")
        sys.exit(FAILURE)


def _give_up(tell: Callable[[str], None]) -> NoReturn:
    """End by a mistake that every rank has found; rank 0 tells it. `tell` is given where it was found."""
    rank = launched_rank()
    if rank > 0 and not _started():
        # No rank can wait for another yet. A launcher ends all of them when rank 0 has told and ended; who is still
        # there then has found what rank 0 does not see.
        time.sleep(_PATIENCE)
        tell(f"on rank {rank}: ")
    elif rank == 0:
        tell("")
    _leave(MISTAKE)


def _leave(code: int) -> NoReturn:
    """End with `code`, together with the other ranks where Horovod has been started."""
    if _started():
        from hvd_novel import comm

        comm.leave(code)
    sys.exit(code)


def _started() -> bool:
    if "hvd_novel.comm" not in sys.modules:  # importing it takes seconds
        return False
    from hvd_novel import comm

    return comm.started()


def _crew() -> Crew:
    """The ranks that prepare a corpus together; without a launcher nothing of Horovod is started."""
    from hvd_novel.corpus.crew import Alone

    if not launched():
        return Alone()
    from hvd_novel.corpus.ranks import Ranks

    crew = Ranks()
    if crew.rank == 0:
        _log(crew.how)
    return crew


def _is_lost_rank(error: Exception) -> bool:
    from hvd_novel.comm import LostRankError

    return isinstance(error, LostRankError)


def _complain(message: str) -> None:
    err.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True, style="red")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # at once: other ranks write too


def _table(title: str, rows: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console().print(table)
