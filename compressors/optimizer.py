"""Horovod's ``DistributedOptimizer`` with our exchange in it. The only module that touches Horovod's optimizer.

``hvd.DistributedOptimizer`` returns an object of a class made for it alone, whose ``synchronize()`` accepts a callable
in place of an operation's handle. So ``_allreduce_grad_async`` of that class is replaced by one that reports the
gradient as ready and returns a callable for the result; no file of Horovod is touched.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch.nn import Parameter

from compressors import state
from compressors.agreement import agree
from compressors.arguments import (
    check_compression,
    check_dense_start,
    check_parameters,
    check_warm_up,
)
from compressors.buckets import BUCKET_BYTES, chosen_for, make_buckets
from compressors.channels import Stage
from compressors.codec import Compressor
from compressors.codecs.none import NoCompression
from compressors.codecs.topk import TopK
from compressors.exchange import Wire
from compressors.hierarchy import Hierarchical
from compressors.ledger import Ledger
from compressors.onebit_adam import MomentumOptimizer
from compressors.reducer import Reducer

SUPPORTED_HOROVOD = "0.28.1"
# Optimizers are counted for each process set, so that operations of several have different names.
_counts: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    scaler: Any = None,
    warm_up: Compressor | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    min_numel: int = 1024,
) -> Any:
    """Wrap `optimizer` as ``horovod.torch.DistributedOptimizer`` does, and exchange gradients by `compression`.

    Every rank of `process_set` calls this with the same arguments. What comes back is Horovod's object: ``step``,
    ``synchronize``, ``skip_synchronize``, ``zero_grad`` (here also with ``set_to_none``) and
    ``backward_passes_per_step`` keep their meaning. Added are ``no_sync()``, ``ledger``,
    ``set_compression(compression)``, ``compression_state_dict()`` and ``load_compression_state_dict(states)``.

    A step in which any rank's gradient is not finite is left out on all ranks: ``synchronize()`` sets all gradients
    to NaN and ``step()`` leaves parameters, optimizer and compressor as they were. On one rank gradients are exact
    and nothing is sent.

    `compression`: a compressor of this package, none by default.
    `op`: ``hvd.Average`` or ``hvd.Sum``.
    `scaler`: the ``GradScaler`` that scales the loss, or a function that gives the scale; needed with loss scaling,
    as gradients are encoded, and residuals kept, unscaled.
    `warm_up`: what carries gradients that `compression` leaves dense at the start, in the place of float32: ``FP16()``,
    ``BF16()`` or ``QSGD()``, whose rounding is forgotten. For the dense stage of `OneBitAdam` and `TopKAdam`, and the
    `dense_steps` of `PowerSGD` and `TopK` (without momentum). What goes by none, fp16, bf16 or rows, and small
    parameters, are sent as without it.
    `bucket_bytes`: float32 bytes of gradients that travel as one.
    `min_numel`: parameters with fewer elements, or fewer than two dimensions, travel densely, unless the compressor
    is no more than a change of precision.

    Raises ValueError for arguments that compression cannot serve, and, on all ranks, if ranks' settings differ;
    RuntimeError for a Horovod release whose internals this has not been checked against.
    """
    if horovod.__version__ != SUPPORTED_HOROVOD:
        raise RuntimeError(
            f"compressors supports Horovod {SUPPORTED_HOROVOD}, found {horovod.__version__}; "
            f"install horovod=={SUPPORTED_HOROVOD}"
        )
    compression = compression or NoCompression()
    _check_arguments(compression, op, gradient_predivide_factor, num_groups, groups)
    check_warm_up(warm_up)
    named = list(named_parameters) if named_parameters is not None else None
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=named,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    _install(wrapped, named, compression, warm_up, _loss_scale(scaler), bucket_bytes, min_numel)
    return wrapped


def _check_arguments(compression: Any, op: int, predivide: float, num_groups: int, groups: Any) -> None:
    check_compression(compression)
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("op must be hvd.Average or hvd.Sum: Adasum combines gradients that must not be compressed")
    if predivide != 1.0:
        raise ValueError("gradient_predivide_factor is not supported: compressors prescale where it is needed")
    if num_groups or groups is not None:
        raise ValueError("groups are not supported: gradients travel in buckets; leave num_groups and groups out")


def _loss_scale(scaler: Any) -> Callable[[], float]:
    if scaler is None:
        return lambda: 1.0
    return scaler if callable(scaler) else scaler.get_scale


def _install(
    wrapped: Any,
    named: Sequence[tuple[str, Parameter]] | None,
    compression: Compressor,
    warm_up: Any,
    scale: Callable[[], float],
    bucket_bytes: int,
    min_numel: int,
) -> None:
    """Put our exchange into the class that Horovod made for this one object."""
    cls: Any = type(wrapped)
    inner: Any = cls.__mro__[1]
    horovod_synchronize, horovod_load = cls.synchronize, cls.load_state_dict

    ledger = Ledger()
    set_id = wrapped.process_set.process_set_id
    prefix = f"compressors.{set_id}.{next(_counts[set_id])}"
    wire = Wire(wrapped.process_set, prefix, ledger)
    trained = _trained(wrapped, named)
    average = wrapped.op == hvd.Average
    share = 1.0 if average else 1.0 / wire.ranks

    wires: dict[str, Wire] = {}

    def reducer_of(compression: Compressor) -> Reducer:
        agree(_settings(wrapped, trained, compression, warm_up, average, bucket_bytes, min_numel), wire)
        buckets = make_buckets(trained, chosen_for(compression, min_numel), bucket_bytes)
        # Names of its own for each compressor: Horovod's cache knows an operation by name, type and shape, and would
        # take an all-to-all for the all-gather that had its name before.
        own = wires.setdefault(
            repr(compression.settings()), Wire(wrapped.process_set, f"{prefix}.{len(wires)}", ledger)
        )
        stage = partial(_stage, wrapped, share)
        return Reducer(buckets, own, ledger, average=average, scale=scale, stage=stage, warm_up=warm_up)

    reducer = reducer_of(compression)
    if warm_up is not None:
        check_dense_start(wrapped, reducer.waiting)
    if isinstance(wrapped, MomentumOptimizer):
        wrapped.attach(_corrected(reducer), alone=wire.ranks == 1)
    known = {parameter for _, parameter in trained}

    def allreduce_grad_async(self: Any, parameter: Parameter) -> tuple[Callable[[], Any], None]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            parameter.grad = _densified(self, parameter, reducer)
        reducer.ready(parameter)

        def result() -> Any:
            reducer.finish()
            return parameter.grad

        return result, None

    def synchronize(self: Any) -> None:
        check_parameters(self, known)
        if wire.resized:
            raise RuntimeError(
                f"the process set no longer has {wire.ranks} ranks: wrap the optimizer anew and load all ranks' states"
            )
        horovod_synchronize(self)
        if wire.ranks == 1:
            reducer.finish()

    def step(self: Any, closure: Any = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() reduces the gradients again after synchronize(); call it inside skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return None if reducer.skipped else inner.step(self, closure)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError("zero_grad() between backward() and step() or synchronize(): gradients are under way")
        inner.zero_grad(self, set_to_none)

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            reducer.abandon()
        except HorovodInternalError:  # a rank is lost, and this the way back to a former state
            reducer.reset()
        horovod_load(self, *args, **kwargs)

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Accumulate gradients without communicating.

        Any number of backward passes may run inside, a different one on each rank (also none). Afterwards either
        run one more backward pass outside, whose hooks send the sums while it goes on, or call ``synchronize()``,
        which sends what was not sent.
        """
        if reducer.under_way:
            raise RuntimeError("no_sync() after gradients were sent: call synchronize() or step() first")
        # Horovod's hooks count this down at each backward pass and communicate at zero.
        delays = self._allreduce_delay
        before = dict(delays)
        delays.update(dict.fromkeys(delays, sys.maxsize))
        try:
            yield
        finally:
            delays.update(before)

    def set_compression(self: Any, compression: Compressor) -> None:
        """Exchange by `compression` from the next step on. All ranks call this, between two steps.

        What the compressor in force remembers is lost: residuals, of those that have error feedback. Raises
        RuntimeError while gradients are under way, ValueError if ranks differ, and with `OneBitAdam` and `TopKAdam`,
        whose stages go with one compressor.
        """
        nonlocal reducer
        if isinstance(wrapped, MomentumOptimizer):
            raise ValueError(f"{inner.__name__} keeps the compressor that it began with")
        if reducer.under_way:
            raise RuntimeError("set_compression() while gradients are under way: call synchronize() or step() first")
        check_compression(compression)
        steps, reducer = reducer.steps, reducer_of(compression)
        reducer.steps = steps

    def compression_state_dict(self: Any) -> dict[str, Any]:
        """This rank's compressor state. Each rank has its own: save all of them."""
        return state.save(reducer, wire)

    def load_compression_state_dict(self: Any, states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take up this rank's own state, or this rank's share of the states of all ranks, whatever their number.

        Raises RuntimeError while gradients are under way.
        """
        if reducer.under_way:
            raise RuntimeError("gradients are under way: call synchronize() or step() before loading")
        state.load(reducer, wire, states)

    cls._allreduce_grad_async = allreduce_grad_async
    cls.synchronize, cls.step, cls.zero_grad = synchronize, step, zero_grad
    cls.load_state_dict, cls.no_sync = load_state_dict, no_sync
    cls.set_compression = set_compression
    cls.compression_state_dict = compression_state_dict
    cls.load_compression_state_dict = load_compression_state_dict
    cls.ledger = property(lambda self: ledger)


def _trained(wrapped: Any, named: Sequence[tuple[str, Parameter]] | None) -> list[tuple[str, Parameter]]:
    """The parameters that Horovod reduces, in the order in which they were named, under Horovod's names."""
    names: dict[Parameter, str] = wrapped._parameter_names
    listed = [parameter for _, parameter in named] if named is not None else list(names)
    in_groups = {parameter for group in wrapped.param_groups for parameter in group["params"]}
    return [(names[p], p) for p in dict.fromkeys(listed) if p in in_groups and p.requires_grad]


def _corrected(reducer: Reducer) -> dict[Parameter, float]:
    """The parameters whose momentum is made before the exchange, with that momentum."""
    return {
        parameter: momentum
        for channel in reducer.channels
        if (momentum := _momentum(channel.bucket.compressor))
        for _, parameter in channel.bucket.parameters
    }


def _momentum(compressor: Compressor) -> float:
    """The momentum that is made before the exchange."""
    if isinstance(compressor, Hierarchical):
        return _momentum(compressor.outer)
    return compressor.momentum if isinstance(compressor, TopK) else 0.0


def _stage(wrapped: Any, share: float) -> Stage:
    """What is exchanged in the next step: gradients, or the momentum of an optimizer in its compressed stage."""
    if not isinstance(wrapped, MomentumOptimizer):
        return Stage()
    if not wrapped.compressed:
        return Stage(dense=True)
    return Stage(outgoing=wrapped.outgoing(share), weights=wrapped.weights)


def _settings(
    wrapped: Any,
    trained: Sequence[tuple[str, Parameter]],
    compression: Compressor,
    warm_up: Compressor | None,
    average: bool,
    bucket_bytes: int,
    min_numel: int,
) -> dict[str, Any]:
    return {
        "optimizer": wrapped.stage_settings() if isinstance(wrapped, MomentumOptimizer) else {},
        "op": "average" if average else "sum",
        "bucket_bytes": bucket_bytes,
        "min_numel": min_numel,
        "compression": compression.settings(),
        "warm_up": warm_up.settings() if warm_up else {},
        "parameters": [
            {"name": name, "shape": list(parameter.shape), "dtype": str(parameter.dtype)} for name, parameter in trained
        ],
    }


def _densified(wrapped: Any, parameter: Parameter, reducer: Reducer) -> torch.Tensor:
    assert parameter.grad is not None
    if not wrapped.sparse_as_dense and not reducer.takes_rows(parameter):
        raise ValueError(
            f"parameter {wrapped._parameter_names[parameter]} has a sparse gradient: choose the compressor 'rows' for "
            "it by a policy, or pass sparse_as_dense=True"
        )
    return parameter.grad.to_dense()
