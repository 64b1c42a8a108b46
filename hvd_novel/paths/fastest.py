"""The fastest of several paths, found by trying each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from hvd_novel.errors import UserError
from hvd_novel.paths.command import Command
from hvd_novel.paths.templates import AS_GIVEN, Path
from hvd_novel.paths.trial import Figures, PathError, measure

TIE = 1.05
"""Times the fastest path's seconds, within which the command stays as given."""


def fastest(
    command: Command,
    paths: Sequence[Path],
    *,
    mib: float,
    timeout: float,
    network_only: bool,
    say: Callable[[str], None],
) -> Path:
    """The path by which the ranks of `command` sum `mib` MiB of gradients in the shortest time; `say` is told why.

    Each is tried by a job of at most `timeout` seconds, unless there is one only. With `network_only`, nothing more is
    tried once the command as it stands has shown its ranks to be on a single host. Raises UserError if no path works.
    """
    if len(paths) == 1:
        say(f"path: {paths[0].name}, the only one to choose from; it is not tried")
        return paths[0]
    measuring = command.measuring(mib)
    found: dict[str, Figures] = {}
    failed: list[str] = []
    for path in paths:
        # A path much slower than another, from start to end, cannot win; one that hangs need not be waited for.
        limit = min([timeout, *(2 * figures.took + 10 for figures in found.values())])
        try:
            found[path.name] = measure(path.of(measuring), limit)
        except PathError as reason:
            failed.append(f"{path.name}: {reason}")
            say(f"left out {failed[-1]}")
            continue
        say(f"{path.name}: {_line(found[path.name], mib)}")
        if network_only and _on_one_host(found):
            break
    if not found:
        by_hand = shlex.join(paths[0].of(measuring))
        raise UserError("\n".join(["no path works:", *failed, f"to see all that the first one says: {by_hand}"]))
    name = choose({name: figures.seconds for name, figures in found.items()})
    say(f"path: {name}, {_why(name, found, network_only)}")
    return next(path for path in paths if path.name == name)


def choose(seconds: dict[str, float]) -> str:
    """The name with the fewest seconds, or AS_GIVEN if it takes at most TIE times as many."""
    best = min(seconds, key=lambda name: seconds[name])
    return AS_GIVEN if seconds.get(AS_GIVEN, float("inf")) <= TIE * seconds[best] else best


def _why(name: str, found: dict[str, Figures], network_only: bool) -> str:
    if network_only and _on_one_host(found):
        return "as all ranks are on one host"
    if len(found) == 1:
        return "the only one that works"
    of_each = ", ".join(f"{other} {1000 * figures.seconds:.1f} ms" for other, figures in found.items())
    fewest = min(figures.seconds for figures in found.values())
    return f"{'the fastest' if found[name].seconds == fewest else 'as good as the fastest'} ({of_each})"


def _on_one_host(found: dict[str, Figures]) -> bool:
    """Whether the command as it stands works, and joins ranks of a single host."""
    return AS_GIVEN in found and found[AS_GIVEN].hosts == 1


def _line(figures: Figures, mib: float) -> str:
    return (
        f"{figures.ranks} ranks on {figures.hosts} {'host' if figures.hosts == 1 else 'hosts'} ({figures.controller}), "
        f"{8 * figures.bytes_per_second / 1e6:.0f} Mbit/s, {1000 * figures.round_seconds:.2f} ms; "
        f"{mib:g} MiB in {1000 * figures.seconds:.1f} ms"
    )
