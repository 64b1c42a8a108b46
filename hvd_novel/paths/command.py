"""A job's command, taken apart: launcher, its options, and the program that ranks run."""

from __future__ import annotations

import enum
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from hvd_novel.errors import UserError

_OPEN_MPI = ("mpirun", "mpiexec", "orterun")
_HOROVODRUN = "horovodrun"
_PROGRAM = re.compile(r"hvd-novel|python[\d.]*")


class Launcher(enum.Enum):
    """Launchers that differ in how a path is given to them."""

    MPIRUN = "mpirun"
    """Open MPI's."""
    HOROVODRUN_MPI = "horovodrun --mpi"
    HOROVODRUN_GLOO = "horovodrun --gloo"


@dataclass(frozen=True)
class Command:
    """``start`` (up to the launcher's name) + ``options`` (of the launcher) + ``program`` (with its arguments)."""

    start: tuple[str, ...]
    options: tuple[str, ...]
    program: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """The parts of a command such as ``mpirun -np 2 hvd-novel train c.yaml``.

        Words may stand before the launcher, as in ``timeout 9h mpirun``, and between its options and the program, as in
        ``numactl -l python train.py``; they stay where they are. Raises UserError if there is no launcher, or no
        program that could be replaced.
        """
        launcher = next((at for at, word in enumerate(words) if _name(word) in (*_OPEN_MPI, _HOROVODRUN)), None)
        if launcher is None:
            known = f"{', '.join(_OPEN_MPI)} and {_HOROVODRUN}"
            raise UserError(f"no launcher in '{' '.join(words)}': paths are known for {known}")
        programs = [at for at in range(launcher + 1, len(words)) if _is_program(words[at])]
        if not programs:
            raise UserError(f"no hvd-novel or python after {words[launcher]} in '{' '.join(words)}': start one of them")
        if _name(words[launcher]) in _OPEN_MPI and ":" in words[programs[0] :]:
            raise UserError("a job of several programs, joined by ':', cannot be measured: start one program")
        start, options, program = words[: launcher + 1], words[launcher + 1 : programs[0]], words[programs[0] :]
        return cls(tuple(start), tuple(options), tuple(program))

    @cached_property
    def launcher(self) -> Launcher:
        """Raises UserError if it is not known what it is, cannot be started, or has been given a path of its own."""
        if _name(self.start[-1]) == _HOROVODRUN:
            return self._horovodrun()
        try:
            asked = subprocess.run([*self.start, "--version"], capture_output=True, text=True, check=False)
        except OSError as error:
            raise cannot_start(self.start, error) from None
        if not re.search("Open MPI|OpenRTE", asked.stdout):
            raise UserError(f"{self.start[-1]} is not Open MPI's, whose options alone are known; try horovodrun --gloo")
        return Launcher.MPIRUN

    def _horovodrun(self) -> Launcher:
        if any(option.startswith("--network-interface") for option in self.options):
            raise UserError("leave out --network-interfaces: horovodrun would join those of a path to them")
        if "--mpi" in self.options:
            return Launcher.HOROVODRUN_MPI
        if "--gloo" in self.options:
            return Launcher.HOROVODRUN_GLOO
        raise UserError("say --mpi or --gloo after horovodrun: what carries the job decides on its paths")

    def measuring(self, mib: float) -> Command:
        """The same launch of the measuring program, for exchanges of `mib` MiB."""
        program = self.program[0]
        hvd_novel = (program,) if _name(program) == "hvd-novel" else (program, "-m", "hvd_novel")
        return Command(self.start, self.options, (*hvd_novel, "bench", "link", "--mib", f"{mib:g}", "--json"))


def become(words: Sequence[str]) -> NoReturn:
    """Replace this process by the command. Raises UserError if it cannot be started."""
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        raise cannot_start(words, error) from None


def cannot_start(words: Sequence[str], error: OSError) -> UserError:
    """What to raise for `error`, met when starting `words`."""
    return UserError(f"{words[0]} cannot be started: {error.strerror}; is it on PATH?")


def _name(word: str) -> str:
    return os.path.basename(word)


def _is_program(word: str) -> bool:
    """A folder, as of ``--wdir /home/me/hvd-novel``, is none."""
    return bool(_PROGRAM.fullmatch(_name(word))) and not ("/" in word and os.path.isdir(word))
