"""Checks of the compressors that need a CUDA device; `scripts/gpu-check` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from compressors.channels import Stage
from compressors.kernels import _triton_path, eager
from hvd_novel.bench import coding
from tests.compressors import parity
from tests.compressors.hooks import SILENT, open_channel, submit

CUDA = torch.device("cuda")
LARGE = 1_000_003
BUCKETS = (25 * 2**18, 2**27)  # elements: of a bucket of 25 MiB, and of 512 MiB, which no cache holds


def checks() -> Iterator[tuple[str, list[str]]]:
    """(what is checked, what is wrong with it), one after the other."""
    paths = {"torch": eager, "Triton": _triton_path()}
    if paths["Triton"] is eager:
        yield "Triton is not installed: left out", []
        del paths["Triton"]
    for path_name, path in paths.items():
        for name in parity.CASES:
            yield f"{name} by {path_name} as on CPUs", _differences(path, name)
    for name in SILENT:
        yield f"hooks of {name} do not wait", _waits(name)


def _differences(path: ModuleType, name: str) -> list[str]:
    found = []
    for size in (*parity.SIZES, LARGE):
        found += parity.differences(path, name, size, CUDA)
    return found


def _waits(name: str) -> list[str]:
    """What torch says of a second step (the first makes tables) in which the host waits for the device."""
    channel, _ = open_channel(SILENT[name], CUDA)
    submit(channel, Stage())
    torch.cuda.set_sync_debug_mode("error")
    try:
        submit(channel, Stage())
    except RuntimeError as error:
        return [str(error)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def times() -> Iterator[str]:
    """What encoding and decoding cost on the device, a line for each codec and length."""
    for numel in BUCKETS:
        rows = coding.passes(numel, 21, "cuda")
        yield f"{numel} elements: a copy takes {1000 * rows.pop('copy')['milliseconds']:.0f} microseconds"
        for name, row in rows.items():
            yield f"{numel} elements: {name} encodes in {row['encode']:.2f} copies, decodes in {row['decode']:.2f}"
