"""mpi4py beside Horovod, in jobs that run on MPI."""

from __future__ import annotations

from typing import Any


def usable_mpi() -> tuple[Any, str]:
    """mpi4py's MPI, which Horovod has initialised and will finalise, and what speaks against its use, if anything."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        return None, f"mpi4py cannot be imported: {error}"
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE  # Horovod calls it from a thread of its own
    return MPI, "" if threads else "MPI does not take calls from several threads"
