"""The entries largest in magnitude.

Aji and Heafield 2017, "Sparse communication for distributed gradient descent"; Lin et al. 2018, "Deep gradient
compression", sections 3.1 (error feedback, there called local accumulation) and 3.3 (density warm-up), sampled
threshold in section 5; owner slices as in Li and Hoefler 2022, "Near-optimal sparse allreduce", section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from compressors import kernels
from compressors.codec import Codec, Frame, Pattern, from_bytes, to_bytes

_VALUE_TYPES = {"float32": torch.float32, "float16": torch.float16}


class TopK(Codec):
    """Keep the fraction `density` of each bucket's entries, those largest in magnitude; the others stay in the
    residual.

    A kept entry takes b = 8 bytes (int32 index, float32 value) or 6 (float16 value, relative to a power of two; the
    rounding error stays in the residual). All-gather sends (N-1)*b*k bytes a rank, the two-phase exchange (k entries
    to the owners of slices, who keep k/N each of the sum) at most 2*b*k at any N; "auto" takes the one that sends
    less, and all-gather where they are equal.

    Warm-up: `dense_steps` without compression, then `ramp_steps` over which the density falls geometrically from 1
    to `density`. Wherever float32 all-reduce sends less, it is used.

    `momentum` > 0 makes momentum on each rank before entries are chosen and forgets it where they were sent (momentum
    correction and masking); the optimizer behind must then have none of its own.

    Plain top-k in front of Adam costs quality even with warm-up, because entries that are sent rarely arrive in lumps
    that inflate the variance: see `TopKAdam`.
    """

    error_feedback = True

    def __init__(
        self,
        density: float = 0.01,
        *,
        values: Literal["float32", "float16"] = "float32",
        exchange: Literal["auto", "all_gather", "two_phase"] = "auto",
        selection: Literal["sampled", "exact"] = "sampled",
        dense_steps: int = 0,
        ramp_steps: int = 0,
        momentum: float = 0.0,
    ) -> None:
        """`selection="exact"` looks at every entry; "sampled" first leaves out what a sample shows to be too small.

        Raises ValueError for a density outside (0, 1] and unknown choices.
        """
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], not {density}")
        if values not in _VALUE_TYPES:
            raise ValueError(f"values must be one of {', '.join(_VALUE_TYPES)}, not {values!r}")
        if exchange not in ("auto", "all_gather", "two_phase"):
            raise ValueError(f"exchange must be auto, all_gather or two_phase, not {exchange!r}")
        if selection not in ("sampled", "exact"):
            raise ValueError(f"selection must be sampled or exact, not {selection!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        if dense_steps < 0 or ramp_steps < 0:
            raise ValueError("dense_steps and ramp_steps must not be negative")
        self.density = density
        self.values = values
        self.exchange = exchange
        self.selection = selection
        self.dense_steps = dense_steps
        self.ramp_steps = ramp_steps
        self.momentum = momentum

    def density_at(self, step: int) -> float:
        """Fraction of entries kept in step `step`, counted from 0."""
        done = step - self.dense_steps + 1
        if done <= 0:
            return 1.0
        if done > self.ramp_steps:
            return self.density
        return self.density ** (done / (self.ramp_steps + 1))

    def starts_dense(self, step: int) -> bool:
        return step < self.dense_steps and not self.momentum  # which is made in dense steps, too

    def kept(self, frame: Frame) -> int:
        """Entries kept of `frame`: at least one, unless it is empty."""
        return min(frame.numel, max(1, math.ceil(self.density_at(frame.step) * frame.numel)))

    def pattern(self, frame: Frame) -> Pattern:
        per_part = self.nbytes(frame)
        sparse = {
            Pattern.ALL_GATHER: (frame.ranks - 1) * per_part,
            Pattern.TWO_PHASE: 2 * (frame.ranks - 1) * per_part // frame.ranks,
        }
        if self.exchange == "all_gather":
            del sparse[Pattern.TWO_PHASE]
        elif self.exchange == "two_phase":
            del sparse[Pattern.ALL_GATHER]
        dense = 2 * (frame.ranks - 1) * 4 * frame.numel // frame.ranks
        best = min(sparse, key=lambda pattern: sparse[pattern])
        return Pattern.DENSE if self.density_at(frame.step) == 1.0 or dense <= sparse[best] else best

    def choose(self, values: Tensor, frame: Frame) -> Tensor:
        """The int64 indices, ascending, of the entries that are kept if they are to be the largest of `values`."""
        assert frame.numel < 2**31, "indices are int32"
        return kernels.top_k(values, self.kept(frame), sampled=self.selection == "sampled")

    def encode(self, values: Tensor, frame: Frame) -> Tensor:
        indices = self.choose(values, frame)
        return self._pack(indices, *self._coded(kernels.gather(values, indices)))

    def encode_error(self, values: Tensor, frame: Frame, chosen: Tensor | None = None) -> Tensor:
        indices = self.choose(values, frame) if chosen is None else chosen
        return self._pack(indices, *self._take(values, indices))

    def encode_slices(
        self, values: Tensor, frame: Frame, rooms: Sequence[Tensor], chosen: Tensor | None = None
    ) -> list[Tensor]:
        indices = self.choose(values, frame) if chosen is None else chosen
        coded, scale = self._take(values, indices)
        begins = list(itertools.accumulate((piece.numel for piece in frame.slices()), initial=0))
        # How many lie in each slice, the host must know, to send them: here it waits for the device.
        bounds = torch.searchsorted(indices, kernels.table(tuple(begins), indices.device)).tolist()
        return [
            self._pack(indices[first:last] - begin, coded[first:last], scale)
            for begin, (first, last) in zip(begins, itertools.pairwise(bounds), strict=False)
        ]

    def decode(self, payload: Tensor, frame: Frame) -> Tensor:
        out = torch.empty(frame.numel, device=payload.device)
        self.decode_into(payload, frame, out)
        return out

    def decode_into(self, payload: Tensor, frame: Frame, out: Tensor) -> None:
        self.decode_add(payload, frame, out.zero_())

    def decode_add(self, payload: Tensor, frame: Frame, total: Tensor) -> None:
        kernels.scatter_add(*self._fields(payload), total)

    def decode_apart(self, payload: Tensor, frame: Frame, factor: float, outs: Sequence[Tensor]) -> kernels.Finite:
        indices, coded, scale = self._fields(payload)
        begins = list(itertools.accumulate(frame.sizes, initial=0))
        bounds = torch.searchsorted(indices, torch.tensor(begins, dtype=torch.int32)).tolist()
        for out, begin, (first, last) in zip(outs, begins, itertools.pairwise(bounds), strict=False):
            kernels.scatter_add(indices[first:last] - begin, coded[first:last], scale * factor, out.zero_())
        return kernels.all_finite(coded.float() * (scale * factor))

    def nbytes(self, frame: Frame) -> int:
        return self._header + self._entry_bytes * self.kept(frame)

    def _fields(self, payload: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """Indices, what is kept as it travels, and by what it is multiplied."""
        count = (payload.numel() - self._header) // self._entry_bytes
        fields = [(torch.int32, count), (_VALUE_TYPES[self.values], count)]
        if not self._header:
            indices, coded = from_bytes(payload, *fields)
            return indices, coded, 1.0
        scale, indices, coded = from_bytes(payload, (torch.float32, 1), *fields)
        return indices, coded, scale

    @property
    def _entry_bytes(self) -> int:
        return 4 + _VALUE_TYPES[self.values].itemsize

    @property
    def _header(self) -> int:
        return 0 if self.values == "float32" else 4

    def _take(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """The code of entries `indices`, of which only the rounding error is left in `values`."""
        coded, scale = self._coded(kernels.gather(values, indices))
        kernels.scatter_add(indices, coded, -1.0 if scale is None else -scale, values)
        return coded, scale

    def _coded(self, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """`kept`, as it travels, and the float32 scale [1] by which it is divided, if there is one."""
        if self.values == "float32":
            return kept, None
        largest = kept.abs().amax(0, keepdim=True) if kept.numel() else kept.new_zeros(1)
        # A power of two, so that scaling does not round; made of its bits, exactly and where the values are.
        exponent = torch.frexp(largest).exponent.clamp_min(-126)
        scale = ((exponent + 127) << 23).view(torch.float32)
        return (kept / scale).half(), scale

    def _pack(self, indices: Tensor, coded: Tensor, scale: Tensor | None) -> Tensor:
        header = [] if scale is None else [scale]
        return to_bytes([*header, indices.int(), coded])
