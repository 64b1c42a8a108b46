"""A path tried by a short job under the user's launcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import psutil

from hvd_novel.paths.command import cannot_start

_GRACE_SECONDS = 10
_FIGURES = re.compile(r'\{"ranks": .*\}')
_TAG = re.compile(r"^\[[\d,]+\]<std(out|err)>:")  # by which launchers tell ranks apart
_BOX = re.compile(r"^-{20,}\n(.*?)\n\s*\n.*?^-{20,}$", re.DOTALL | re.MULTILINE)  # Open MPI's; and its first paragraph
_NOISE = re.compile(r' {4}|\s*File "|\[.*ORTE_ERROR_LOG')  # Python's tracebacks have code after four spaces
_ABSENT = re.compile(r"network device .* is not available.*")
_LONGEST = 200
_COMPLAINT = re.compile(r"error|fail|unable|invalid|cannot|not found|not available|none of|\bno\b", re.IGNORECASE)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class PathError(Exception):
    """The job could not run by a path; the message is one line that tells why."""


@dataclass(frozen=True)
class Figures:
    """What a measuring job printed, see `hvd_novel/bench/link.py`; `took` is the seconds from its start to its end."""

    ranks: int
    hosts: int
    controller: str
    round_seconds: float
    bytes_per_second: float
    seconds: float
    took: float


def measure(words: Sequence[str], timeout: float) -> Figures:
    """Run the measuring job `words` for at most `timeout` seconds; nothing of it is left running.

    Raises PathError if it fails or prints no figures, UserError if it cannot be started.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run(words, out, err, timeout)
        took = time.monotonic() - begin
        printed, complaints = _text(out), _text(err)
    if code is None:
        raise PathError(f"no answer within {round(timeout, 1):g} s")
    if code != 0:
        raise PathError(f"exit code {code}: {_reason(complaints)}")
    # UCX only warns, on stdout, and takes another way where there is one, as on a single host.
    if absent := _ABSENT.search(printed):
        raise PathError(textwrap.shorten(absent.group(), _LONGEST))
    found = _FIGURES.search(printed)
    if found is None:
        raise PathError("the measuring job printed no figures")
    figures = json.loads(found.group())
    rate = figures.pop("bytes_per_second")["all_reduce"]
    return Figures(**figures, bytes_per_second=rate, took=took)


def _run(words: Sequence[str], out: IO[bytes], err: IO[bytes], timeout: float) -> int | None:
    """The exit code, None if time was over."""
    with _signals_as_exits():
        try:
            # In a session of its own, so that Ctrl-C comes here alone, and launchers see one end only.
            job = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            raise cannot_start(words, error) from None
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for number in _SIGNALS:  # a second one must not stop this
                signal.signal(number, signal.SIG_IGN)
            _stop(job)


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Signals that would end this process at once let it stop its job first."""
    former = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(job: subprocess.Popen[bytes]) -> None:
    """End `job` if it runs: by the launcher, which alone reaches other hosts, or else without it."""
    if job.poll() is not None:
        return
    family = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_SECONDS)
    finally:  # a second Ctrl-C only ends the waiting
        job.kill()
        job.wait()
        for member in family:  # ranks have sessions of their own
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _reason(complaints: str) -> str:
    """The first line that complains, the last if none does; not Open MPI's trouble with printing its reasons."""
    joined = _BOX.sub(lambda box: " ".join(box.group(1).split()), complaints)
    lines = [line for line in (_TAG.sub("", line) for line in joined.splitlines()) if line.strip(" -\t")]
    telling = (line for line in lines if _COMPLAINT.search(line) and not _NOISE.match(line))
    return textwrap.shorten(next(telling, lines[-1] if lines else "it said nothing").strip(" -\t"), _LONGEST)
