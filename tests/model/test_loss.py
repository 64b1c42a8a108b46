"""The chunked cross-entropy: equal to the plain one, without its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from hvd_novel.model.loss import IGNORE, cross_entropy_sum


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_equals_the_plain_loss_and_gradients(chunk: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, bias=False).double()
    hidden = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (20,))
    labels[[0, 5, 19]] = IGNORE
    plain = cross_entropy(head(hidden), labels, reduction="sum", ignore_index=IGNORE)
    expected = torch.autograd.grad(plain, [hidden, head.weight])
    chunked = cross_entropy_sum(hidden, labels, head, chunk)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=0)
    for got, want in zip(torch.autograd.grad(chunked, [hidden, head.weight]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_no_labels_give_zero_and_zero_gradients() -> None:
    head = torch.nn.Linear(6, 11)
    hidden = torch.randn(4, 6, requires_grad=True)
    loss = cross_entropy_sum(hidden, torch.full((4,), IGNORE), head, 2)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


PEAK = """
import resource, sys, torch
from hvd_novel.model.loss import cross_entropy_sum
torch.set_num_threads(1)
hidden, labels = torch.randn(2048, 16, requires_grad=True), torch.randint(0, 100_000, (2048,))
head = torch.nn.Linear(16, 100_000, bias=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cross_entropy_sum(hidden, labels, head, int(sys.argv[1])).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_peak_memory_follows_the_chunk_not_the_pack() -> None:
    """2048 tokens x 100,000 words in fp32 are 781 MiB of logits; with chunks of 64 tokens they are 24 MiB."""

    def peak_mib(chunk: int) -> int:
        done = subprocess.run([sys.executable, "-c", PEAK, str(chunk)], capture_output=True, text=True, check=True)
        return int(done.stdout)

    whole, chunked = peak_mib(2048), peak_mib(64)
    logits = 2048 * 100_000 * 4 / 2**20
    assert whole > logits
    assert chunked < 0.75 * logits
