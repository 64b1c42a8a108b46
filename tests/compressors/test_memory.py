"""What compression holds beside gradients and payloads: two copies of residuals, and at most two buckets of scratch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from torch.nn import Parameter
import compressors
from compressors.buckets import make_buckets
from compressors.channels import Stage
from compressors.ledger import Ledger
from compressors.reducer import Reducer
from compressors.rehearsal import _Echo

name, ranks, bucket = sys.argv[1], 4, 25 * 2**20

def steps(count):
    parameters = [(str(index), Parameter(torch.zeros(1000, 1000))) for index in range(count)]
    for _, parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    before = status("VmRSS")
    compressor = compressors.get(name)
    buckets = make_buckets(parameters, lambda name, parameter: compressor, bucket)
    ledger = Ledger()
    wire = _Echo(ranks, ledger)
    wire.apart = lambda name: _Echo(ranks, ledger)
    warm_up = compressors.get("int8") if len(sys.argv) > 2 else None
    stages = [Stage(dense=True)] * bool(warm_up) + [Stage()] * 3
    stage = lambda: stages[reducer.steps]
    reducer = Reducer(buckets, wire, ledger, average=True, scale=lambda: 1.0, stage=stage, warm_up=warm_up)
    open("/proc/self/clear_refs", "w").write("5")  # the highest begins anew
    for _ in stages:
        wire.start()
        for _, parameter in reversed(parameters):
            reducer.ready(parameter)
        reducer.finish()
    return status("VmHWM") - before

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return 1024 * int(line.split()[1])

torch.set_num_threads(1)
steps(1)  # loads and compiles what there is to load and compile
print(steps(40))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the highest memory is read from Linux's /proc")
@pytest.mark.parametrize(("name", "warm_up"), [("onebit", []), ("topk", []), ("onebit", ["int8"])])
def test_two_residuals_and_two_buckets(name, warm_up):
    command = [sys.executable, "-c", SCRIPT, name, *warm_up]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    gradients, bucket = 4 * 40_000_000, 25 * 2**20
    residuals = 2 * gradients * (1 + 1 / 4)  # a rank's own, and those of the slices that it owns of four
    payloads = 2 * gradients // 32 if name == "onebit" else 2 * 8 * 400_000
    payloads += len(warm_up) * 40_000_000 // 4  # of one step, which the wire that stands for the others keeps
    assert residuals < int(done.stdout) + bucket, "a residual is missing: the measure is wrong"
    assert int(done.stdout) <= residuals + payloads + 2 * bucket
