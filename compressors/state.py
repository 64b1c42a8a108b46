"""What a rank remembers, as a state that can be saved, and taken up again by another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compressors.channels import Channel
from compressors.exchange import Wire
from compressors.feedback import Residual
from compressors.reducer import Reducer

VERSION = 1


def save(reducer: Reducer, wire: Wire) -> dict[str, Any]:
    """This rank's state: tensors on the CPU that are copies, numbers and strings.

    `residuals` and `momenta` map parameter names to float32 tensors in the parameter's shape; `owed` maps them to
    (first element, flat float32 tensor): the part of the sum's residual that this rank owns. `memory` is what
    cooperative compressors remember, equal on all ranks.
    """
    residuals: dict[str, Tensor] = {}
    momenta: dict[str, Tensor] = {}
    owed: dict[str, tuple[int, Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for channel in reducer.channels:
        residuals |= _by_parameter(channel, channel.residual)
        momenta |= _by_parameter(channel, channel.momentum)
        if channel.owed is not None:
            for name, first, part in _owned_parts(channel, wire, channel.owed.value):
                owed[name] = (first, part.cpu().clone())
        memory |= {name: tensor.cpu().clone() for name, tensor in channel.memory.items()}
    return {
        "version": VERSION,
        "ranks": wire.ranks,
        "rank": wire.rank,
        "steps": reducer.steps,
        "residuals": residuals,
        "momenta": momenta,
        "owed": owed,
        "memory": memory,
    }


def load(reducer: Reducer, wire: Wire, states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
    """Take up this rank's own state, or its share of the `states` of all ranks.

    At the number of ranks that saved, a rank gets back exactly its own. At another, what is owed is dealt out anew:
    its sum over ranks stays the same. Raises ValueError if `states` are not enough or are of another model.
    """
    every = [states] if isinstance(states, dict) else list(states)
    _check(every, reducer, wire)
    by_rank = {state["rank"]: state for state in every}
    reducer.steps = every[0]["steps"]
    if every[0]["ranks"] == wire.ranks:
        mine, exact = [by_rank[wire.rank]], True
    else:
        mine, exact = [by_rank[rank] for rank in sorted(by_rank) if rank % wire.ranks == wire.rank], False
    for channel in reducer.channels:
        for kept in (channel.residual, channel.owed, channel.momentum):
            if kept is not None:
                kept.value.zero_()
        device = channel.bucket.device
        names = [name for name, _ in channel.bucket.parameters]
        saved = every[0]["memory"]
        channel.memory = {name: saved[name].to(device, copy=True) for name in names if name in saved}
        for state in mine:
            _take(channel, wire, state, exact=exact)


def _take(channel: Channel, wire: Wire, state: dict[str, Any], *, exact: bool) -> None:
    if channel.residual is None:
        return
    _add_by_parameter(channel, channel.residual, state["residuals"])
    _add_by_parameter(channel, channel.momentum, state["momenta"])
    owed = {name: state["owed"][name] for name, _ in channel.bucket.parameters if name in state["owed"]}
    if not owed:
        return
    places = {name: (first, part.numel()) for name, (first, part) in owed.items()}
    flat = torch.empty(_own_frame(channel, wire)[1], device=channel.bucket.device)
    own_parts = list(_owned_parts(channel, wire, flat))
    if exact and places == {name: (first, part.numel()) for name, first, part in own_parts}:
        for name, _, part in own_parts:
            part.copy_(owed[name][1])
        channel.restore_owed(flat)
        return
    # Another layout of slices: what this rank owed as an owner, it now owes as a sender.
    start = 0
    for name, parameter in channel.bucket.parameters:
        if name in owed:
            first, part = owed[name]
            channel.residual.value[start + first : start + first + part.numel()] += part.to(flat.device)
        start += parameter.numel()


def _by_parameter(channel: Channel, kept: Residual | None) -> dict[str, Tensor]:
    if kept is None:
        return {}
    parts = kept.value.split(list(channel.bucket.sizes))
    return {
        name: part.cpu().clone().view(parameter.shape)
        for (name, parameter), part in zip(channel.bucket.parameters, parts, strict=True)
    }


def _add_by_parameter(channel: Channel, kept: Residual | None, saved: dict[str, Tensor]) -> None:
    if kept is None:
        return
    parts = kept.value.split(list(channel.bucket.sizes))
    for (name, _), part in zip(channel.bucket.parameters, parts, strict=True):
        if name in saved:
            part += saved[name].reshape(-1).to(part.device)


def _own_frame(channel: Channel, wire: Wire) -> tuple[int, int]:
    """First element and length of this rank's slice of the bucket."""
    slices = channel.bucket.frame(0, wire.ranks, wire.rank).slices()
    return sum(piece.numel for piece in slices[: wire.rank]), slices[wire.rank].numel


def _owned_parts(channel: Channel, wire: Wire, owned: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """(name, first element within the parameter, part of `owned`) of each parameter in this rank's slice."""
    begin, length = _own_frame(channel, wire)
    start = 0
    for name, parameter in channel.bucket.parameters:
        first, last = max(begin, start), min(begin + length, start + parameter.numel())
        if first < last:
            yield name, first - start, owned[first - begin : last - begin]
        start += parameter.numel()


def _check(states: Sequence[dict[str, Any]], reducer: Reducer, wire: Wire) -> None:
    if not states or any(state.get("version") != VERSION for state in states):
        raise ValueError(f"not compressor states of version {VERSION}; start without them")
    saved, ranks = states[0]["ranks"], sorted(state["rank"] for state in states)
    complete = ranks == list(range(saved))
    if not complete and (saved != wire.ranks or wire.rank not in ranks):
        raise ValueError(
            f"these are the states of ranks {ranks} out of {saved}, and there are {wire.ranks} now: "
            "give the list of all ranks' states"
        )
    shapes = {
        name: parameter.shape
        for channel in reducer.channels
        if channel.residual is not None
        for name, parameter in channel.bucket.parameters
    }
    for state in states:
        for name, residual in state["residuals"].items():
            if name not in shapes:
                raise ValueError(
                    f"the state holds a residual of '{name}', for which nothing is kept now; start without"
                )
            if residual.shape != shapes[name]:
                raise ValueError(
                    f"the state's residual of '{name}' has shape {tuple(residual.shape)}, the parameter "
                    f"{tuple(shapes[name])}; start without it"
                )
