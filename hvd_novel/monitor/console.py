"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hvd_novel.monitor.records import Record


class ConsoleSink:
    """One line per `every` steps, with means over the interval and the time left."""

    def __init__(self, console: Console, *, first_step: int, steps: int, every: int, bar: bool) -> None:
        self._console, self._first, self._steps, self._every = console, first_step, steps, every
        self._interval: list[Record] = []
        self._seconds = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
            disable=not bar,
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step, eta="")
        self._bar.start()

    def emit(self, record: Record) -> None:
        """Print `record`, or keep it until its interval is full."""
        if record["kind"] == "train":
            self._train(record)
        elif record["kind"] == "eval":
            self._print(
                f"eval at step {record['step']}: loss {record['loss']:.4f} | "
                f"bits/character {record['bits_per_character']:.4f} | perplexity {record['perplexity']:.2f} | "
                f"{record['tokens']:,} tokens"
            )
        elif record["kind"] == "sample":
            self._print(f"sample at step {record['step']}: {record['prompt']}{record['text']}")
        elif record["kind"] == "ledger":
            self._print(
                f"epoch {record['epoch']} done at step {record['step']}: {record['tokens']:,} tokens = "
                f"{record['trained']:,} trained + {record['masked']:,} masked (context, first of a sample)"
            )
        elif record["kind"] == "compression":
            times = ", ".join(
                f"{name} {seconds:.3g} s" for name, seconds in record.items() if isinstance(seconds, float)
            )
            self._print(
                f"compression=auto at step {record['step']}: {record['name']} ({record['how']}"
                f"{': ' + times + ' a step' if times else ''})"
            )
        elif record["kind"] == "checkpoint":
            self._print(f"checkpoint at step {record['step']}: {record['path']} ({record['seconds']:.1f} s)")

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.stop()

    def _train(self, record: Record) -> None:
        step = record["step"]
        self._interval.append(record)
        self._seconds += record["seconds"]
        left = (self._steps - step) * self._seconds / (step - self._first)
        self._bar.update(self._task, completed=step, eta=f"eta {duration(left)}")
        if step % self._every == 0 or step in (self._first + 1, self._steps):
            self._print(self._line(left))
            self._interval.clear()

    def _line(self, seconds_left: float) -> str:
        last = self._interval[-1]
        trained = sum(r["trained_tokens"] for r in self._interval)
        loss = sum(r["loss"] * r["trained_tokens"] for r in self._interval) / max(1, trained)
        rate = sum(r["tokens"] for r in self._interval) / max(1e-9, sum(r["seconds"] for r in self._interval))
        sent = sum(r["bytes_sent"] for r in self._interval) / len(self._interval)
        ratio = sum(r["compression_ratio"] for r in self._interval) / len(self._interval)
        skipped = sum(not r["updated"] for r in self._interval)
        parts = [
            f"step {last['step']}/{self._steps}",
            f"loss {loss:.4f}",
            f"grad norm {last['grad_norm']:.3f}",
            f"lr {last['lr']:.2e}",
            f"{short(rate)} tokens/s",
            f"{short(last['total_trained_tokens'])} tokens",
            f"epoch {last['epoch']:.2f}",
            f"sent {short(sent)}B/step ({ratio:.3g}x)",
            f"memory {last['memory_bytes'] / 2**30:.2f} GiB",
            f"eta {duration(seconds_left)}",
        ]
        if skipped:
            parts.append(f"{skipped} steps left out: gradient not finite")
        return " | ".join(parts)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for suffix in ("", "K", "M", "B"):
        if abs(number) < 1000:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 65 -> 1m05s; 7 -> 7s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
