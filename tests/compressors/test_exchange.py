"""What is handed to Horovod."""

from __future__ import annotations

import pytest
import torch

from compressors.exchange import _joined


@pytest.mark.parametrize("sizes", [[3, 4, 3], [0, 7, 2], [5, 0, 0], [0, 0, 0], [8]])
def test_parts_side_by_side_travel_as_they_lie(sizes):
    memory = torch.arange(20, dtype=torch.uint8)
    parts = list(memory[5:].split([*sizes, 15 - sum(sizes)]))[:-1]
    joined = _joined(parts)
    assert torch.equal(joined, memory[5 : 5 + sum(sizes)])
    if 0 not in sizes:
        assert joined.data_ptr() == memory[5:].data_ptr()


def test_parts_that_lie_elsewhere_are_joined():
    memory = torch.arange(20, dtype=torch.uint8)
    for parts in ([memory[4:8], memory[:4]], [memory[:4], memory[5:9]], [memory[:4], memory.clone()[4:8]]):
        assert torch.equal(_joined(parts), torch.cat(parts))
