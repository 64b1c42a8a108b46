"""The rows of an embedding that were used.

With a large vocabulary most rows of an embedding's gradient are zero on every rank, but not the same ones: ranks
gather each other's rows, as Horovod and others do for sparse gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.codec import Compressor, from_bytes, to_bytes


class SparseRows(Compressor):
    """Exchange only the rows that are not zero, with an int32 index each, without loss.

    For embeddings that are not tied to an output layer (whose gradient has no zero rows): choose it for them by a
    policy. An all-gather sends (N-1) times a rank's rows, so it pays while a rank touches fewer than 2/N of them.
    Sparse gradients are taken too; they come back dense.
    """

    skips_small = False
    bucketed = False
    unscales = False

    def accepts(self, shape: torch.Size, min_numel: int) -> bool:
        return len(shape) == 2 and shape.numel() > 0

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def encode(self, matrix: Tensor) -> Tensor:
        """The uint8 payload of the rows of `matrix` that are not zero: how many, which, and their values."""
        rows = (matrix != 0).any(1).nonzero().flatten()
        count = torch.tensor([rows.numel()], dtype=torch.int32, device=matrix.device)
        return to_bytes([count, rows.int(), matrix[rows]])

    def decode_add(self, payloads: Tensor, dtype: torch.dtype, total: Tensor) -> None:
        """Add to the matrix `total` the rows of payloads that lie one after the other; values are of `dtype`."""
        width = total.shape[1]
        while payloads.numel():
            count = int(payloads[:4].clone().view(torch.int32))
            length = 4 + count * (4 + width * dtype.itemsize)
            _, rows, values = from_bytes(
                payloads[:length], (torch.int32, 1), (torch.int32, count), (dtype, count * width)
            )
            total.index_add_(0, rows.long(), values.view(count, width).to(total.dtype))
            payloads = payloads[length:]
