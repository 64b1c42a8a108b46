"""The kernels in Triton against the compiled loops: on a GPU where there is one, else by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compressors
from compressors import kernels
from compressors.codec import Frame
from tests.compressors import parity

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not here")

from compressors.kernels import gpu, gpu_topk

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("size", parity.SIZES)
@pytest.mark.parametrize("name", parity.CASES)
def test_the_same_as_the_compiled_loops(name, size):
    assert not parity.differences(gpu, name, size, DEVICE)


def test_a_sample_that_serves_is_enough():
    values, k = parity.normal(4097).to(DEVICE), 1025
    plan = gpu_topk.sample_of(4097, k)
    assert plan is not None
    found, count = gpu_topk._from_sample(values, k, 2 * k, *plan)
    assert k <= int(count) <= 2 * k
    assert found.tolist() == kernels.cpu.top_k(values.cpu(), k, sampled=False).tolist()


def test_memory_with_gaps_is_refused():
    values = torch.zeros(20, device=DEVICE)[::2]
    with pytest.raises(AssertionError, match="contiguous"):
        gpu.pack_signs(values)
    with pytest.raises(AssertionError, match="contiguous"):
        gpu.add_scaled(values, 1.0, None, torch.zeros(10, device=DEVICE))


CODECS = {
    "onebit": compressors.OneBit(),
    "topk": compressors.TopK(0.3, values="float16"),
    "topk few": compressors.TopK(0.01),
    "int8": compressors.QSGD(),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_payloads_are_the_same(codec, monkeypatch):
    frame = Frame((2000, 37, 1, 5, 2100), step=3, ranks=3, rank=1)
    # All magnitudes are multiples of 1/8, so that their sums do not depend on the order.
    values = (parity.normal(frame.numel).clamp(-10, 10) * 8).round() / 8
    found = []
    for path, device in ((kernels.cpu, torch.device("cpu")), (gpu, DEVICE)):
        monkeypatch.setattr(kernels, "_path", lambda values, path=path: path)
        left, total = values.clone().to(device), values.clone().to(device)
        rooms = [torch.empty(codec.nbytes(piece), dtype=torch.uint8, device=device) for piece in frame.slices()]
        parts = codec.encode_slices(left, frame, rooms)
        whole = codec.encode_error(values.clone().to(device), frame)
        codec.decode_add(whole, frame, total)
        found.append([tensor.cpu() for tensor in (*parts, whole, left, total)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [None, float("nan"), -float("inf")])
def test_what_is_not_finite_is_cleared(bad, monkeypatch):
    monkeypatch.setattr(kernels, "_path", lambda values: gpu)
    values = torch.full((5000,), 3e38)
    if bad is not None:
        values[4321] = bad
    out = torch.empty(5000, device=DEVICE)
    sums = [kernels.add_scaled(values.to(DEVICE), 1.0, None, out)]
    sums, finite = kernels.clear_unless_finite(out, sums)
    assert bool(finite) == (bad is None)
    assert sums.tolist() == [pytest.approx(5000 * 3e38, rel=1e-6) if bad is None else 0.0]
    assert torch.equal(out.cpu(), values if bad is None else torch.zeros(5000))


def test_kernels_compile_for_cuda(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_for_cuda.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    assert int(done.stdout) >= 20
