"""The report of ``hvd-novel plan`` as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_novel.figures import save

_BAR = 40  # characters


def render(report: dict[str, Any], console: Console) -> None:
    """Print the report of `plan_report`."""
    console.print(_facts(report))
    console.print(_histogram(report["lengths"]["histogram"]))
    console.print(_strategies(report))


def _facts(report: dict[str, Any]) -> Table:
    lengths, tokens, padding, bound = (report[key] for key in ("lengths", "step_tokens", "padding", "bound"))
    table = Table(title=f"{report['steps']:,} steps on {report['ranks']} ranks", show_header=False)
    rows = {
        "samples, tokens": f"{report['documents']:,}, {report['tokens']:,}",
        "tokens of a sample": f"median {lengths['median']:,.0f}, mean {lengths['mean']:,.0f}, "
        f"95 % below {lengths['p95']:,.0f}, longest {lengths['max']:,}",
        "steps of an epoch": f"{report['steps_per_epoch']:,}",
        "tokens of a step": f"{tokens['min']:,} to {tokens['max']:,}, mean {tokens['mean']:,.0f}",
        "padding avoided": f"{padding['share']:.1%} of what batches of {padding['batch']} padded samples hold; "
        f"the largest has {padding['largest']:,} tokens, packs at most {report['cap']:,}",
        "room left in packs": f"{report['packs_unfilled']:.1%}, which costs nothing",
        "costliest sample / mean rank": f"{bound['mean']:.2f}, at most {bound['max']:.2f}; "
        f"above 1 in {bound['binding_steps']:,} steps, which no strategy can balance",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _histogram(histogram: dict[str, list[int]]) -> Table:
    table = Table(title="lengths of samples", show_header=False, box=None)
    edges, counts = histogram["edges"], histogram["counts"]
    for first, last, count in zip(edges, edges[1:], counts, strict=False):
        table.add_row(f"{first:,} to {last - 1:,}", f"{count:,}", "#" * -(-_BAR * count // max(counts)))
    return table


def _strategies(report: dict[str, Any]) -> Table:
    limit = report["bound"]["utilisation"]
    table = Table(
        title="how evenly ranks are loaded, by strategy",
        caption=f"slowest: largest cost of a rank / mean. No strategy can be busy for more than {limit:.1%}.",
    )
    for column in ("strategy", "busy, mean", "worst 5 %", "worst", "slowest, mean", "95 %", "max", "packs a rank"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, row in report["strategies"].items():
        busy, slowest, packs = row["utilisation"], row["slowest"], row["packs"]
        table.add_row(
            name,
            *(f"{busy[key]:.1%}" for key in ("mean", "p05", "min")),
            *(f"{slowest[key]:.2f}" for key in ("mean", "p95", "max")),
            f"{packs['min']}-{packs['max']}, {packs['mean']:.1f}",
        )
    return table


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the lengths, and the balance of each step, as a PNG. Raises UserError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    lengths, steps = figure.subplots(2, 1)
    histogram = report["lengths"]["histogram"]
    lengths.stairs(histogram["counts"], histogram["edges"], fill=True)
    lengths.set(xscale="log", xlabel="tokens of a sample", ylabel="samples")
    padding = report["padding"]
    lengths.set_title(
        f"{report['documents']:,} samples; padding would be {padding['share']:.0%} of batches of {padding['batch']}"
    )
    for name, busy in report["per_step"]["utilisation"].items():
        mean = report["strategies"][name]["utilisation"]["mean"]
        steps.plot(busy, label=f"{name}: {mean:.1%}", linewidth=1, marker="." if len(busy) == 1 else None)
    limit = report["bound"]["utilisation"]
    steps.plot(report["per_step"]["limit"], "k--", label=f"possible: {limit:.1%}", linewidth=1)
    steps.set(xlabel="step", ylabel="mean / largest cost of ranks", ylim=(0, 1.02))
    steps.set_title(f"{report['ranks']} ranks, {report['step_tokens']['mean']:,.0f} tokens a step")
    steps.legend(loc="lower right")
    save(figure, path)
