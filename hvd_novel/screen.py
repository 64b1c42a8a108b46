"""Where commands print what they found."""

from __future__ import annotations

from rich.console import Console

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
    kind = Console if found.is_terminal else _Piped
    return kind(width=max(least, found.width))
