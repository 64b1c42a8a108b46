"""How much memory there is, how much was used, and how to tell that there was too little.

A GPU and a process limit (``ulimit -v``) refuse what is too much, and the program goes on. A machine or a container
whose memory is used up kills: there the peak is measured and the next one foretold.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

# Limit and use of a group of processes, in version 2 and version 1.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation was refused, by a GPU or by the operating system."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def give_back(device: torch.device) -> None:
    """Return what is not used any more to the device, or to the operating system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(AttributeError):  # of glibc; without it threads may find no room for their stacks
            ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """What this machine, or the container, can still give to all its processes together."""
    groups = Path("/proc/self/cgroup").read_text()
    return min([_proc("meminfo", "MemAvailable"), *left_in_groups(groups, Path("/sys/fs/cgroup"))])


def resident_bytes() -> int:
    """Physical memory of this process."""
    return _proc("self/status", "VmRSS")


def peak_bytes() -> int:
    """The most that `resident_bytes` was since `reset_peak`."""
    return _proc("self/status", "VmHWM")


def reset_peak() -> None:
    """Let `peak_bytes` begin anew. Where that is not allowed it stays too large, which is safe."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _proc(file: str, key: str) -> int:
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{file} has no {key}")


def left_in_groups(groups: str, root: Path) -> Iterator[int]:
    """Bytes left in each control group around a process, from its ``/proc/self/cgroup`` and where groups are mounted.

    Both versions of control groups.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = Path(path.lstrip("/"))
            for folder in {group, *group.parents}:
                yield from _left(root / controllers / folder)


def _left(folder: Path) -> Iterator[int]:
    for limit, used in _FILES:
        with suppress(OSError, ValueError):  # absent, or "max"
            yield int((folder / limit).read_text()) - int((folder / used).read_text()) + _cached(folder)


def _cached(folder: Path) -> int:
    """Bytes of files that a group holds in memory and gives up when it needs more."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # Version 1 counts the groups inside a group apart, though its use includes them.
    return sum(int(fields.get(f"total_{name}", fields[name])) for name in ("inactive_file", "active_file"))
