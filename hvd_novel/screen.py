"""Where commands print what they found."""

from __future__ import annotations

from rich.console import Console

from hvd_novel.launcher import launched

WIDE = 120
"""Columns of the widest tables."""


class _Piped(Console):
    """Output that is no terminal; lines of tables are ASCII, as launchers cut what they forward at any byte."""

    @property
    def encoding(self) -> str:
        """What rich chooses the lines of tables by; text is written as it is."""
        return "ascii"


def console(*, least: int = 0) -> Console:
    """Standard output, at least `least` columns wide."""
    found = Console()
    width = max(least, found.width)
    if found.is_terminal and not launched():
        return Console(width=width)
    return _Piped(width=width, force_terminal=False)  # mpirun gives ranks a terminal, and forwards what they write
