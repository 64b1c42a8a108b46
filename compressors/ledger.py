"""What this rank put on the wire, and how long it took.

Counted are the bytes that leave a rank when Horovod uses rings: an all-reduce sends 2(N-1)/N of its buffer, an
all-gather passes on N-1 parts of the mean size (for equal parts: N-1 times its own), an all-to-all sends what goes
to others. Indices, scales, padding and the agreement on non-finite gradients are in it; the headers of the
transport and Horovod's own coordination messages are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Account:
    """Bytes and seconds of one step, or of all."""

    bytes_sent: int = 0
    """Bytes that this rank sent, all phases."""
    bytes_between: int = 0
    """Those of them that a `Hierarchical` compressor sent between nodes."""
    bytes_dense: int = 0
    """Bytes that a float32 ring all-reduce of the same gradients would have sent."""
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "exchange": 0.0, "decode": 0.0})
    """Seconds spent encoding (with submission), waiting for Horovod, and decoding (with the second encoding of
    two-phase exchanges)."""

    @property
    def ratio(self) -> float:
        """`bytes_dense` / `bytes_sent`; 1 where nothing is sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0


class Ledger:
    """The accounts of one optimizer: `last` step and `total`. Its own figures are those of the last step."""

    def __init__(self) -> None:
        self.last = Account()
        self.total = Account()
        self._open = Account()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in the last step."""
        return self.last.bytes_sent

    @property
    def bytes_between(self) -> int:
        """Those of them that a `Hierarchical` compressor sent between nodes."""
        return self.last.bytes_between

    @property
    def bytes_dense(self) -> int:
        """Bytes that a float32 ring all-reduce would have sent in the last step."""
        return self.last.bytes_dense

    @property
    def ratio(self) -> float:
        """Bytes a float32 ring all-reduce would have sent / bytes sent, in the last step."""
        return self.last.ratio

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the last step by phase: encode, exchange, decode."""
        return self.last.seconds

    def sent(self, count: int, *, between: bool = False) -> None:
        """Count bytes of the step under way; `between` nodes of a hierarchy, or otherwise."""
        self._open.bytes_sent += count
        self._open.bytes_between += count if between else 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase` of the step under way."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._open.seconds[phase] += time.perf_counter() - begin

    def close_step(self, bytes_dense: int) -> None:
        """End the step under way."""
        self._open.bytes_dense = bytes_dense
        self.last, self._open = self._open, Account()
        self.total.bytes_sent += self.last.bytes_sent
        self.total.bytes_between += self.last.bytes_between
        self.total.bytes_dense += self.last.bytes_dense
        for phase, seconds in self.last.seconds.items():
            self.total.seconds[phase] += seconds


def ring_all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one of `ranks` sends to all-reduce a buffer of `nbytes` in a ring, rounded up."""
    return -(-2 * (ranks - 1) * nbytes // ranks)
