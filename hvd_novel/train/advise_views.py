"""The findings of `advise` as tables and a recommendation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hvd_novel.tuning.schemes import DENSE, SAFE


def render(found: dict[str, Any], console: Console) -> None:
    """Print what `advise.advise` found."""
    for table in _tables(found):
        console.print(table)
    if found["recommended"]:
        for line in recommendation(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def recommendation(found: dict[str, Any]) -> list[str]:
    """The scheme to take, why, and the lines to paste."""
    rows = {row["scheme"]: row for row in found["schemes"]}
    name = found["recommended"]
    chosen, dense = rows[name], rows[DENSE]
    how = "measured" if chosen["measured"] else "predicted"
    lines = [f"recommended: {name}, {chosen[how]:.3g} s a step ({how}), dense {dense[how]:.3g} s"]
    if name == DENSE:
        others = [f"{other} below {_rate(rows[other]['break_even_mbit'])}" for other in SAFE if other != DENSE]
        lines.append(f"on slower networks, as predicted: {', '.join(others)}")
    else:
        lines.append(f"dense is as fast from {_rate(chosen['break_even_mbit'])} on, as predicted")
    faster = [row for row in rows.values() if not row["safe"] and row[how] < chosen[how]]
    if faster:
        best = min(faster, key=lambda row: row[how])
        lines.append(
            f"{best['scheme']} would take {best[how]:.3g} s, but changes training: see compressors/README.md, and "
            "compare with `hvd-novel bench convergence`"
        )
    return [*lines, yaml.safe_dump({"compression": chosen["settings"]}, default_flow_style=None, sort_keys=False)]


def _tables(found: dict[str, Any]) -> Iterator[Table]:
    if found["schemes"]:
        yield _here(found)
    places = dict.fromkeys(row["mbit"] for row in found["elsewhere"])
    for mbit in places:
        yield _scale(found, mbit)
    if len(places) > 1:
        yield _fastest(found, list(places))


def _here(found: dict[str, Any]) -> Table:
    link = found["link"]
    printed = Table(
        title=f"{found['ranks']} ranks ({found['controller']}), {found['parameters']:,} parameters",
        caption=f"work {_ms(found['work']['seconds'])} ms | round {_ms(link['round_seconds'])} ms | message "
        f"{_ms(link['hop_seconds'])} ms | overlap {link['overlap']:.0%} | Mbit/s: "
        + ", ".join(f"{kind} {rate:,.0f}" for kind, rate in link["mbit"].items()),
    )
    columns = ("scheme", "MB sent", "coding ms", "wire ms", "hidden ms", "step ms", "measured", "error", "break-even")
    for column in columns:
        printed.add_column(column, justify="left" if column == "scheme" else "right")
    for row in found["schemes"]:
        printed.add_row(
            row["scheme"] + ("" if row["safe"] else " *"),
            _mb(row["bytes_sent"]),
            *(_ms(row[key]) for key in ("coding", "wire", "hidden", "predicted")),
            _ms(row["measured"]) if row["measured"] else "",
            f"{row['error']:+.0%}" if row["measured"] else "",
            "" if row["scheme"] == DENSE else _rate(row["break_even_mbit"]),
        )
    return printed


def _scale(found: dict[str, Any], mbit: float | None) -> Table:
    rows = [row for row in found["elsewhere"] if row["mbit"] == mbit]
    printed = Table(title=f"predicted: ms a step (MB that a rank sends), {_place(mbit)}")
    printed.add_column("ranks", justify="right")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        printed.add_column(scheme, justify="right")
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        cells = [f"{_ms(row['seconds'])} ({_mb(row['bytes_sent'])})" for row in rows if row["ranks"] == ranks]
        printed.add_row(f"{ranks:,}", *cells)
    return printed


def _fastest(found: dict[str, Any], places: list[float | None]) -> Table:
    printed = Table(title=f"predicted: fastest of {', '.join(SAFE)} (of all)")
    printed.add_column("ranks", justify="right")
    for mbit in places:
        printed.add_column(_place(mbit))
    for ranks in dict.fromkeys(row["ranks"] for row in found["elsewhere"]):
        cells = []
        for mbit in places:
            rows = [row for row in found["elsewhere"] if (row["ranks"], row["mbit"]) == (ranks, mbit)]
            every = min(rows, key=lambda row: row["seconds"])
            safe = min((row for row in rows if row["scheme"] in SAFE), key=lambda row: row["seconds"])
            cells.append(f"{safe['scheme']} ({every['scheme']})")
        printed.add_row(f"{ranks:,}", *cells)
    return printed


def _place(mbit: float | None) -> str:
    return "this network" if mbit is None else _rate(mbit)


def _rate(mbit: float | None) -> str:
    """100 Mbit/s, 2.5 Gbit/s; of a break-even, any rate for infinite and no rate for 0."""
    if mbit is None:
        return "any rate"
    if mbit == 0:
        return "no rate"
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g}"
