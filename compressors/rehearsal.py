"""An exchange of gradients with nobody at the other end: what it would send, in which operations; what coding takes.

The reducer runs as it does in training, on a wire whose other ranks send what this one sends. So bytes, operations and
coding of any number of ranks can be told on one.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors.buckets import BUCKET_BYTES, chosen_for, make_buckets
from compressors.channels import Stage
from compressors.codec import Compressor
from compressors.codecs.rows import SparseRows
from compressors.exchange import Pending, Wire
from compressors.hierarchy import Hierarchical
from compressors.ledger import Ledger
from compressors.reducer import Reducer

_STEP = 10**6  # past the dense start of every schedule
_DIFFERENT = 4  # payloads, at most, that ranks send to an owner


class Kind(enum.Enum):
    """Collectives that differ in speed."""

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_HALF = "all_reduce_half"
    """In float16, which processors may add more slowly than float32."""
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True)
class Operation:
    """One collective of a step."""

    kind: Kind
    round: int
    """Operations that its bucket has to wait for first."""
    bytes_sent: int
    """By this rank."""
    late: bool
    """Whether it begins when all gradients are there; the others may travel while backward goes on."""


@dataclass(frozen=True)
class Rehearsal:
    """What a step's exchange consists of."""

    operations: tuple[Operation, ...]
    bytes_sent: int
    """As the ledger of a real step has it. Where a rank's payloads for others depend on its values (top-k), what it
    would be if all chose alike."""
    bytes_dense: int
    coding_seconds: float
    """Median of what a step takes without the wire: reading and writing gradients, encoding and decoding."""


def rehearse(
    parameters: Sequence[tuple[str, Parameter]],
    compression: Compressor,
    ranks: int,
    *,
    rounds: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    min_numel: int = 1024,
) -> Rehearsal:
    """Exchange random gradients of `parameters` as one of `ranks`, a few times to warm up and then `rounds` times.

    Gradients that there are are lost: there are none afterwards. Residuals and the like are those of the rehearsal
    alone. The last two arguments are `DistributedOptimizer`'s. Raises ValueError for fewer than two ranks, and for
    compressors that need to know more of the others than their number ("hierarchical", "rows").
    """
    if ranks < 2:
        raise ValueError(f"an exchange needs two ranks or more, not {ranks}")
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    buckets = make_buckets(trained, chosen_for(compression, min_numel), bucket_bytes)
    if any(isinstance(bucket.compressor, (Hierarchical, SparseRows)) for bucket in buckets):
        raise ValueError(f"{compression!r} cannot be rehearsed: what it sends depends on the other ranks")
    ledger = Ledger()
    wire = _Echo(ranks, ledger)
    reducer = Reducer(buckets, wire, ledger, average=False, scale=lambda: 1.0, stage=Stage)
    reducer.steps = _STEP
    order = [parameter for _, parameter in reversed(trained) if parameter.numel()]
    times = []
    try:
        warm_up = min(ranks, _DIFFERENT)
        for count in range(warm_up + rounds):
            _draw(order, seed=count)
            times.append(_exchange(reducer, wire, order))
    finally:
        for parameter in order:
            parameter.grad = None
    return Rehearsal(
        tuple(wire.operations), ledger.bytes_sent, ledger.last.bytes_dense, statistics.median(times[warm_up:] or times)
    )


def _draw(parameters: Sequence[Parameter], seed: int) -> None:
    for index, parameter in enumerate(parameters):
        generator = torch.Generator(parameter.device).manual_seed(1000 * seed + index)
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = gradient.normal_(0.0, 1e-3, generator=generator)


def _exchange(reducer: Reducer, wire: _Echo, order: Sequence[Parameter]) -> float:
    """Seconds of one exchange, without those of the wire."""
    wire.start()
    start = time.perf_counter()
    for parameter in order:
        wire.late = parameter is order[-1]
        reducer.ready(parameter)
    reducer.finish()
    _wait_for_device(order[0].device)
    return time.perf_counter() - start - wire.seconds


class _Echo(Wire):
    """A wire whose other ranks send what this one, the first, sends; where their parts are shorter, zeros.

    To owners of slices they send what this one sent itself in the last steps: if all sent the largest elements of the
    same places, their sum would be all zeros elsewhere, and looking for its largest take long.
    """

    def __init__(self, ranks: int, ledger: Ledger) -> None:
        self.ranks, self.rank = ranks, 0
        self._ledger, self._between, self._scratch = ledger, False, None
        self._own: dict[str, deque[Tensor]] = {}
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.operations: list[Operation] = []
        self.seconds = 0.0
        """Spent here, not in the code that uses the wire."""
        self.late = False
        self._rounds: Counter[str] = Counter()
        self._count = 0

    def _all_reduce(self, tensor: Tensor, name: str, average: bool) -> Pending:
        half = tensor.dtype == torch.float16
        self._record(Kind.ALL_REDUCE_HALF if half else Kind.ALL_REDUCE, name)
        return _Answer(self, tensor.device, lambda: tensor if average else tensor.mul_(self.ranks))

    def _all_gather(self, part: Tensor, name: str, total_bytes: int) -> Pending:
        self._record(Kind.ALL_GATHER, name)
        alike = total_bytes == self.ranks * part.nbytes
        total = total_bytes // part.element_size()
        return _Answer(self, part.device, lambda: part.repeat(self.ranks) if alike else part.new_zeros(total))

    def _all_to_all(self, parts: Sequence[Tensor], name: str) -> Pending:
        self._record(Kind.ALL_TO_ALL, name)
        own = self._own.setdefault(name, deque(maxlen=_DIFFERENT))
        start = time.perf_counter()
        own.append(parts[self.rank].clone())  # its memory may be used again in the next step
        self.seconds += time.perf_counter() - start
        came = [own[rank % len(own)] for rank in range(self.ranks)]
        lengths = torch.tensor([part.numel() for part in came], dtype=torch.int32)
        return _Answer(self, came[0].device, lambda: (torch.cat(came), lengths))

    def _sent(self, count: int) -> None:
        super()._sent(count)
        self._count = count  # of the operation that is recorded next

    def _record(self, kind: Kind, name: str) -> None:
        bucket = ".".join(name.split(".")[:2])
        self.operations.append(Operation(kind, self._rounds[bucket], self._count, self.late))
        self._rounds[bucket] += 1


class _Answer(Pending):
    """What comes back, made when it is waited for."""

    def __init__(self, wire: _Echo, device: torch.device, make: Callable[[], Any]) -> None:
        self._wire, self._device, self._make = wire, device, make

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        _wait_for_device(self._device)
        start = time.perf_counter()
        answer = self._make()
        _wait_for_device(self._device)
        self._wire.seconds += time.perf_counter() - start
        return answer


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
