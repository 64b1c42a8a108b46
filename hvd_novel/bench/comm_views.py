"""What the benchmark of the exchange found, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_novel.bench.comm import Exchange, Report
from hvd_novel.figures import save

_PHASES = ("encode", "exchange", "decode")


def table(report: Report) -> Table:
    """The exchanges and their limits, a line each."""
    printed = Table(
        title=f"{report.ranks} ranks, {report.elements:,} elements, {8 * report.bytes_per_second / 1e6:.0f} Mbit/s, "
        f"{report.copy_bytes_per_second / 1e9:.1f} GB/s of memory",
        caption="wire, memory: the ms that bytes sent, and the least memory traffic, take; "
        "share: the longer of the two / ms",
    )
    limits = ("wire", "memory", "share")
    for column in ("scheme", "bucket", "MB sent", "ms", *_PHASES, *limits, "x none", "x fp16"):
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in report.exchanges:
        times = (row.seconds, row.encode, row.exchange, row.decode, row.wire_seconds, row.memory_seconds)
        printed.add_row(
            row.scheme,
            f"{row.bucket_mib:g} MiB",
            f"{row.bytes_sent / 1e6:.2f}",
            *(f"{1000 * seconds:.0f}" for seconds in times),
            f"{row.share:.0%}",
            *("" if ratio is None else f"{ratio:.1f}" for ratio in (row.against_none, row.against_fp16)),
        )
    return printed


def model_table(report: Report) -> Table:
    """The exchanges and what the cost model gives them."""
    printed = Table(title="the cost model of hvd-novel advise")
    for column in ("scheme", "bucket", "ms", "predicted", "error"):
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in report.exchanges:
        times = (f"{1000 * seconds:.0f}" for seconds in (row.seconds, row.predicted))
        printed.add_row(row.scheme, f"{row.bucket_mib:g} MiB", *times, f"{row.error:+.0%}")
    return printed


def coding_table(report: Report) -> Table:
    """Coding in passes of a copy."""
    printed = Table(
        title=f"coding on one core, in copies of the tensor ({report.coding['copy']['milliseconds']:.1f} ms)"
    )
    for column in ("codec", "encode", "decode", "both"):
        printed.add_column(column, justify="left" if column == "codec" else "right")
    for name, row in report.coding.items():
        if name != "copy":
            printed.add_row(name, *(f"{row[way]:.2f}" for way in ("encode", "decode", "both")))
    return printed


def plot(report: Report, path: Path) -> None:
    """Write times of encoding, exchange and decoding, beside the limits, as a PNG; a panel for each bucket size.

    Raises UserError if it cannot be written.
    """
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.bucket_mib for row in report.exchanges))
    schemes = len(report.exchanges) // len(sizes)
    figure = Figure(figsize=(2 + 6 * len(sizes), 2 + 0.8 * schemes), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharex=True, sharey=True, squeeze=False)[0]
    for axis, size in zip(panels, sizes, strict=True):
        _draw(axis, [row for row in report.exchanges if row.bucket_mib == size])
        axis.set(xlabel="ms", title=f"buckets of {size:g} MiB")
    figure.suptitle(f"{report.ranks} ranks, {report.elements:,} elements; share: the longer limit / time")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, path)


def _draw(axis: Any, rows: Sequence[Exchange]) -> None:
    """A bar of the phases for each exchange, and two thin ones of its limits below."""
    places = range(len(rows))
    ends = [0.0] * len(rows)
    for phase in _PHASES:
        widths = [1000 * getattr(row, phase) for row in rows]
        axis.barh([place - 0.2 for place in places], widths, 0.4, left=ends, label=phase)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, place, end in zip(rows, places, ends, strict=True):
        axis.annotate(f" {1000 * row.seconds:.0f} ms, share {row.share:.0%}", (end, place - 0.2), va="center")
    for below, limit, colour in ((0.1, "wire", "0.3"), (0.28, "memory", "0.65")):
        widths = [1000 * getattr(row, f"{limit}_seconds") for row in rows]
        axis.barh([place + below for place in places], widths, 0.16, color=colour, label=f"limit: {limit}")
    axis.set_yticks(places, [row.scheme for row in rows])
    axis.margins(x=0.3)  # room for what stands at the ends of bars
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
