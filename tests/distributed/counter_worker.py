"""Run by every rank: draw from a shared counter while rank 0 computes; each rank writes what it drew."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hvd_novel import comm

topology = comm.init(deterministic=False)
first, second = comm.shared_counter("first"), comm.shared_counter("second")
drawn = []
for _ in range(int(sys.argv[2])):
    drawn.append(first.next())
    if topology.rank == 0:
        end = time.perf_counter() + 0.0005  # a busy rank gets fewer
        while time.perf_counter() < end:
            pass
(Path(sys.argv[1]) / f"{topology.rank}.json").write_text(
    json.dumps({"drawn": drawn, "second": second.next(), "how": first.how, "mpi4py": "mpi4py" in sys.modules})
)
comm.leave(0)
