"""Two levels: sums inside a node with all bits, or half of them; between nodes, compressed.

Inside a node memory or NVLink carries the bytes, between nodes a network that may be a hundred times slower. Each rank
of a node exchanges its share of the node's sums with the ranks that have the same place on the other nodes, so that
all ranks' links are used at once: Cho et al. 2019, "BlueConnect: decomposing all-reduce for deep learning on
heterogeneous network hierarchy". Compression only between nodes is in Gan et al. 2021, "BAGUA: scaling up distributed
learning with system relaxations".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors.buckets import Bucket
from compressors.channels import Channel, Stage
from compressors.codec import Codec, Compressor, Cooperative, Frame, from_bytes
from compressors.codecs.bf16 import BF16
from compressors.codecs.fp16 import FP16
from compressors.codecs.int8 import QSGD
from compressors.codecs.none import DenseBuckets, NoCompression
from compressors.exchange import Pending, Wire, all_gather
from compressors.kernels import Finite
from compressors.sums import Exchange, values_of
from compressors.vetoes import veto

OpenChannel = Callable[[Bucket, Compressor, Wire], Channel]


class Hierarchical(Compressor):
    """`inner` (none, fp16 or bf16) inside a node, `outer` (most others) between nodes.

    A bucket of gradients goes to the ranks of the node in L equal shares (all-to-all), each of which adds up one share
    of its node's L gradients; it exchanges that sum by `outer` with the ranks at its place on the other nodes; an
    all-gather inside the node joins the shares. Per rank, of a bucket of b bytes: 2(L-1)/L b times what `inner` leaves
    of it inside the node, and what `outer` sends of b/L between nodes. Residuals, momenta and densities are those of
    `outer`, of its share of the *node's* sum. One node alone loses nothing but what `inner` does; one rank on each
    node is `outer` as it is by itself.

    float16 holds sums over all ranks divided by their number, without the loss scale: what is beyond 65504 skips the
    step, what is below 6e-8 is lost. bfloat16 has float32's range.

    The process sets of nodes, and between them, are made when the optimizer is wrapped, which needs
    HOROVOD_DYNAMIC_PROCESS_SETS=1, or are found if ``hvd.init(process_sets=...)`` made them.
    """

    def __init__(
        self,
        inner: Compressor | None = None,
        outer: Compressor | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`inner` is none by default, `outer` int8.

        `nodes`: the ranks of each node, all of the same number; Horovod's hosts by default. Raises ValueError for an
        `inner` that is not a change of precision, an `outer` that does not work on any part of a gradient, and nodes
        of different size.
        """
        inner = inner or NoCompression()
        outer = outer or QSGD()
        if not isinstance(inner, NoCompression | FP16 | BF16):
            raise ValueError(f"inner must be none, fp16 or bf16, not {inner!r}")
        if isinstance(outer, NoCompression):
            outer = DenseBuckets()
        if not isinstance(outer, Codec | Cooperative) or not outer.bucketed:
            raise ValueError(
                f"outer cannot be {outer!r}: choose a compressor of flat gradients, and give rows, other policies and "
                "hierarchies to parameters by policies outside of this one"
            )
        if nodes is not None and len({len(node) for node in nodes}) != 1:
            raise ValueError(f"nodes={nodes}: all nodes must have the same number of ranks")
        self.inner: Codec = inner
        self.outer: Codec | Cooperative = outer
        self.nodes = [sorted(node) for node in nodes] if nodes is not None else None

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        return self.outer.error_feedback

    def accepts(self, shape: torch.Size, min_numel: int) -> bool:
        return isinstance(self.outer, NoCompression) or self.outer.accepts(shape, min_numel)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self.outer.carrier(dtype)

    def settings(self) -> dict[str, Any]:
        return {
            "compressor": type(self).__name__,
            "inner": self.inner.settings(),
            "outer": self.outer.settings(),
            "nodes": self.nodes,
        }

    def starts_dense(self, step: int) -> bool:
        return self.outer.starts_dense(step)

    def nodes_of(self, wire: Wire) -> list[list[int]]:
        """The ranks of `wire`, as Horovod numbers them, on each node. Raises ValueError if that cannot be."""
        nodes = self.nodes if self.nodes is not None else wire.nodes
        if sorted(itertools.chain(*nodes)) != wire.members:
            raise ValueError(f"nodes={nodes} must have each of the ranks {wire.members} once")
        if len({len(node) for node in nodes}) != 1:
            raise ValueError(f"nodes={nodes}: all nodes must have the same number of ranks")
        return nodes


def open_hierarchy(bucket: Bucket, compressor: Hierarchical, wire: Wire, open_channel: OpenChannel) -> Channel:
    """The channel of a bucket on two levels, or of the outer compressor where there is but one. Collective."""
    if wire.ranks == 1:
        return open_channel(bucket, compressor.outer, wire)
    inside, between = _wires(compressor.nodes_of(wire), wire)
    if inside.ranks == 1:
        return open_channel(bucket, compressor.outer, between)
    return HierarchicalChannel(bucket, compressor, wire, open_channel)


def _wires(nodes: Sequence[Sequence[int]], wire: Wire) -> tuple[Wire, Wire]:
    """The wires inside this rank's node, and between it and the ranks at its place on the others."""
    inside = wire.among(nodes, "inside")
    return inside, wire.among(list(zip(*nodes, strict=True)), "between", between=True)


@dataclass(frozen=True)
class Share(Bucket):
    """The part of a bucket that one rank of each node exchanges; its gradients are the node's sums."""

    pieces: tuple[tuple[int, int], ...]
    """(first element, elements) of what of each parameter lies in it."""
    sums: Tensor
    """The node's sums, to be written before they are read: flat, float32."""

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        return [(name, *piece) for (name, _), piece in zip(self.parameters, self.pieces, strict=True)]

    def _sources(
        self, inverse_scale: float, outgoing: Callable[[Parameter, Tensor], Tensor] | None
    ) -> Iterator[tuple[Tensor, float]]:
        assert outgoing is None, "what goes out was chosen before the node's sum"
        return ((part, inverse_scale) for part in self.sums.split(list(self.sizes)))

    def stage(self, whole: Stage) -> Stage:
        """What of the `whole` bucket's stage is left to do with the sums."""
        weights = whole.weights
        if weights is None:
            return Stage(dense=whole.dense)
        pieces = {parameter: piece for (_, parameter), piece in zip(self.parameters, self.pieces, strict=True)}

        def weights_here(parameter: Parameter) -> Tensor | None:
            first, numel = pieces[parameter]
            found = weights(parameter)
            return None if found is None else found.reshape(-1)[first : first + numel]

        return Stage(dense=whole.dense, weights=weights_here)


def _share(bucket: Bucket, compressor: Compressor, index: int, begin: int, end: int) -> Share:
    """Elements `begin` to `end` of `bucket`, as bucket number `index`."""
    parameters, pieces, start = [], [], 0
    for name, parameter in bucket.parameters:
        first, last = max(begin - start, 0), min(end - start, parameter.numel())
        if first < last:
            parameters.append((name, parameter))
            pieces.append((first, last - first))
        start += parameter.numel()
    sums = torch.empty(end - begin, device=bucket.device)
    return Share(index, compressor, tuple(parameters), tuple(pieces), sums)


def _bounds(sizes: Sequence[int], shares: int, *, whole: bool) -> list[int]:
    """Where equal shares begin and end; at the nearest end of a parameter where parameters must stay `whole`."""
    ends = list(itertools.accumulate(sizes, initial=0))
    even = [ends[-1] * share // shares for share in range(shares + 1)]
    return [min(ends, key=lambda end: abs(end - bound)) for bound in even] if whole else even


class HierarchicalChannel(Channel):
    """The exchange of one bucket inside the node, and of a share of it between nodes."""

    def __init__(self, bucket: Bucket, compressor: Hierarchical, wire: Wire, open_channel: OpenChannel) -> None:
        nodes = compressor.nodes_of(wire)
        inside, between = _wires(nodes, wire)
        self._inner, self._inside = compressor.inner, inside
        bounds = _bounds(bucket.sizes, inside.ranks, whole=isinstance(compressor.outer, Cooperative))
        self._spans = list(itertools.pairwise(bounds))
        index = bucket.index * inside.ranks + inside.rank
        self._share = _share(bucket, compressor.outer, index, *self._spans[inside.rank])
        self._outer = open_channel(self._share, compressor.outer, between) if self._share.parameters else None
        self._stage = Stage()
        super().__init__(bucket, compressor, wire)
        self.shares = {"nodes": nodes, "bounds": bounds, "parameters": [name for name, _ in bucket.parameters]}

    @property
    def remembers(self) -> Channel | None:
        return self._outer

    def load(self, inverse_scale: float, stage: Stage) -> Finite:
        self._stage = self._share.stage(stage)
        self._values = torch.empty(self.bucket.numel, device=self.bucket.device)
        return self.bucket.read(self._values, inverse_scale, None, stage.outgoing)[1]

    def release(self) -> None:
        if self._outer is not None:
            self._outer.release()

    def commit(self) -> None:
        if self._outer is not None:
            self._outer.commit()

    def _compressed(self, values: Tensor, frame: Frame) -> Exchange:
        """Scatter inside the node, exchange the share's sum between nodes, gather inside the node."""
        pieces = [frame.cut(begin, end) for begin, end in self._spans]
        own = pieces[self._inside.rank]
        payloads = [
            self._encode(values[begin:end], piece) for (begin, end), piece in zip(self._spans, pieces, strict=True)
        ]
        joined, lengths = yield self._inside.all_to_all(payloads, self.bucket.name + ".scatter")
        self._share.sums.zero_()
        for payload in joined.split(lengths.tolist()):
            self._share.sums.add_(self._decode(payload, own))
        finite = self._outer is None or self._outer.load(1.0, self._stage)
        vetoes = yield self.wire.all_reduce(veto([finite], values.device), self.bucket.name + ".vetoes")
        if int(vetoes):  # a sum, or its code, is beyond the largest number: all ranks skip the step
            return torch.full_like(values, float("nan"))
        total = yield from self._between_nodes(frame.step)
        sizes = [self._inner.nbytes(piece) for piece in pieces]
        parts = yield from all_gather(self._inside, self.bucket.name + ".gather", self._encode(total, own), sizes)
        return torch.cat([self._decode(part, piece) for part, piece in zip(parts, pieces, strict=True)])

    def _between_nodes(self, step: int) -> Generator[Pending, Any, Tensor]:
        if self._outer is None:
            return self._share.sums
        if self._outer.wire.ranks == 1:
            return self._outer.alone()
        return values_of((yield from self._outer.run(step)))

    def _encode(self, values: Tensor, frame: Frame) -> Tensor:
        return self._inner.encode(values.float(), frame).view(torch.uint8)

    def _decode(self, payload: Tensor, frame: Frame) -> Tensor:
        if isinstance(self._inner, FP16):
            (payload,) = from_bytes(payload, (torch.float16, frame.numel))
        return self._inner.decode(payload, frame)
