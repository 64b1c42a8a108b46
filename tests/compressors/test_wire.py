"""What leaves the interfaces of emulated hosts, by `scripts/bench-wire`. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUMEL = 4000 * 2500


def _can_emulate_hosts() -> bool:
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "ethtool", "unshare", "mpirun")):
        return False
    made = subprocess.run([SCRIPTS / "netlab", "up", "1"], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run([SCRIPTS / "netlab", "down"], check=True)
    return made


def test_compressed_gradients_are_small_at_the_wire(tmp_path):
    if not _can_emulate_hosts():
        pytest.skip("needs root, iproute2 and ethtool, and no emulated hosts in use")
    file = tmp_path / "wire.json"
    root = os.pathsep.join(path for path in (str(SCRIPTS.parent), os.environ.get("PYTHONPATH")) if path)
    # Ranks that confer less often: their idle messages would count on a busy machine.
    quiet = ["--cycle-ms", "10"]
    command = [SCRIPTS / "bench-wire", "--ranks", "4", "--steps", "1", *quiet, "--json", file]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, check=True, timeout=500)
    rows = {row["compressor"].split("`")[1]: row for row in json.loads(file.read_text())}
    for name, least in (("onebit", 28), ("topk", 28), ("int8", 3.7)):
        assert rows[name]["dense_bytes"] / rows[name]["wire_bytes"] >= least, name
    assert all(row["wire_bytes"] > row["ledger_bytes"] for row in rows.values())
    headers = 2 * 4 * 4
    assert max(rows["topk"]["ledger_bytes_of_ranks"]) <= 2 * 6 * (NUMEL // 100) + headers
