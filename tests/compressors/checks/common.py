"""What checks share: parameters with chosen gradients, the same arithmetic in one process, comparisons of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import horovod.torch as hvd
import torch
from torch import Tensor
from torch.nn import Parameter

import compressors
from compressors.codec import Compressor

SHAPES = {"embed": (64, 32), "weight": (37, 41), "bias": (41,), "head": (7, 300)}

VARIANTS: dict[str, Callable[[], Compressor]] = {
    **{name: (lambda name=name: compressors.get(name)) for name in compressors.available()},
    "topk all_gather": lambda: compressors.TopK(0.05, exchange="all_gather", selection="exact"),
    "topk two_phase float16": lambda: compressors.TopK(0.05, exchange="two_phase", values="float16"),
    "randomk unbiased": lambda: compressors.RandomK(0.1, error_feedback=False),
    "int8 with feedback": lambda: compressors.ErrorFeedback(compressors.QSGD()),
    "policies": lambda: compressors.get("topk", density=0.1, policies=[{"match": "e*", "name": "onebit"}]),
    "powersgd with a dense start": lambda: compressors.PowerSGD(2, dense_steps=1),
    "hierarchical none": lambda: two_levels("none"),
    "hierarchical onebit": lambda: two_levels("onebit"),
    "hierarchical powersgd": lambda: two_levels("powersgd"),
    "topk warm-up": lambda: compressors.TopK(0.05, exchange="two_phase", dense_steps=1, ramp_steps=2),
}


def two_levels(outer: str, inner: str = "none", **options) -> Compressor:
    """A hierarchy with two ranks on each node where there are four ranks, else with one."""
    ranks = list(range(hvd.size()))
    nodes = [ranks[:2], ranks[2:]] if hvd.size() == 4 else [[rank] for rank in ranks]
    return compressors.get("hierarchical", inner={"name": inner}, outer={"name": outer, **options}, nodes=nodes)


# One for each way in which a bucket travels, for checks of what all compressors share.
TYPICAL = {
    name: VARIANTS[name]
    for name in ("none", "fp16", "int8", "onebit", "topk all_gather", "powersgd", "policies", "hierarchical onebit")
}


def make_parameters(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32):
    """Named parameters, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def gradients_of(rank: int, step: int, parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """The gradients that `rank` has in `step`: every rank can compute those of all."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in parameters.items()
    }


def backward(parameters: dict[str, Parameter], gradients: dict[str, Tensor], factor: float = 1.0) -> None:
    """A backward pass that adds exactly ``gradients * factor``."""
    loss = sum((parameters[name] * (gradient * factor)).sum() for name, gradient in gradients.items())
    loss.backward()


def wrap(parameters: dict[str, Parameter], compression: Compressor | None = None, optimizer=None, **options):
    """A wrapped optimizer, plain SGD unless another is given."""
    optimizer = optimizer or torch.optim.SGD(list(parameters.values()), lr=0.1)
    return compressors.DistributedOptimizer(
        optimizer, named_parameters=parameters.items(), compression=compression, **options
    )


def exchange(optimizer, parameters: dict[str, Parameter], step: int, factor: float = 1.0) -> dict[str, Tensor]:
    """The reduced gradients of `step`."""
    optimizer.zero_grad()
    backward(parameters, gradients_of(hvd.rank(), step, parameters), factor)
    optimizer.synchronize()
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def summed(step: int, parameters: dict[str, Parameter], ranks: Iterable[int] | None = None) -> dict[str, Tensor]:
    """The float64 sum of all ranks' gradients of `step`."""
    every = [gradients_of(rank, step, parameters) for rank in (range(hvd.size()) if ranks is None else ranks)]
    return {name: sum(gradients[name].double() for gradients in every) for name in parameters}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative L2 distance of each tensor."""
    for name, reference in expected.items():
        distance = (found[name].double() - reference.double()).norm()
        assert distance <= tolerance * max(float(reference.double().norm()), 1e-30), f"{name}: {distance:.3e}"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bitwise, NaN equal to NaN."""
    for name, reference in expected.items():
        assert found[name].shape == reference.shape, name
        assert torch.equal(found[name].nan_to_num(7.5e33), reference.nan_to_num(7.5e33)), name


_digests: dict[str, str] = {}


def must_be_the_same(label: str, tensors: dict[str, Tensor]) -> None:
    """Ask for the same bits on all ranks; looked at when the check is over, by `compare_ranks`."""
    for name, tensor in tensors.items():
        data = tensor.detach().double().numpy().tobytes()
        _digests[f"{label}: {name}"] = hashlib.sha256(data).hexdigest()


def compare_ranks() -> str | None:
    """What is not the same on all ranks, of what had to be since the last call. Collective."""
    everywhere = hvd.allgather_object(_digests, name="digests")
    labels = sorted({label for digests in everywhere for label in digests})
    different = [label for label in labels if len({digests.get(label) for digests in everywhere}) > 1]
    _digests.clear()
    return f"not the same on all ranks: {different}" if different else None


def states_of_all_ranks(optimizer) -> list[dict]:
    """The compressor states of all ranks."""
    return hvd.allgather_object(optimizer.compression_state_dict())


def owed_in_total(states: list[dict], parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """What all ranks together have not sent yet, in float64: residuals of senders and of owners."""
    total = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in parameters.items()}
    for state in states:
        for name, residual in state["residuals"].items():
            total[name] += residual
        for name, (first, part) in state["owed"].items():
            total[name].view(-1)[first : first + part.numel()] += part
    return total
