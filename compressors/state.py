"""What a rank remembers, as a state that can be saved, and taken up again by another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from compressors.channels import Channel
from compressors.exchange import Wire
from compressors.feedback import Residual
from compressors.reducer import Reducer

VERSION = 2


def save(reducer: Reducer, wire: Wire) -> dict[str, Any]:
    """This rank's state: tensors on the CPU that are copies, numbers and strings.

    `residuals` and `momenta` map parameter names to float32 tensors in the parameter's shape; `owed` maps them to
    (first element, flat float32 tensor): the part of the sum's residual that this rank owns. `memory` is what
    cooperative compressors remember, equal on all ranks that have it. Where nodes share out buckets, a rank has only
    what lies in its share, and zeros around it.
    """
    residuals: dict[str, Tensor] = {}
    momenta: dict[str, Tensor] = {}
    owed: dict[str, tuple[int, Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for channel in _remembering(reducer):
        residuals |= _by_parameter(channel, channel.residual)
        momenta |= _by_parameter(channel, channel.momentum)
        if channel.owed is not None:
            for name, first, part in _owned_parts(channel, channel.owed.value):
                owed[name] = (first, part.cpu().clone())
        memory |= {name: tensor.cpu().clone() for name, tensor in channel.memory.items()}
    return {
        "version": VERSION,
        "ranks": wire.ranks,
        "rank": wire.rank,
        "shares": _shares(reducer),
        "steps": reducer.steps,
        "residuals": residuals,
        "momenta": momenta,
        "owed": owed,
        "memory": memory,
    }


def load(reducer: Reducer, wire: Wire, states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
    """Take up this rank's own state, or its share of the `states` of all ranks.

    At the number of ranks that saved, in the same nodes, a rank gets back exactly its own. Otherwise what is owed is
    dealt out anew: its sum over ranks stays the same. Raises ValueError if `states` are not enough or are of another
    model.
    """
    every = [states] if isinstance(states, dict) else list(states)
    _check(every, reducer, wire)
    by_rank = {state["rank"]: state for state in every}
    memory = {name: tensor for state in every for name, tensor in state["memory"].items()}
    exact = _same_layout(every[0], reducer, wire)
    reducer.steps = every[0]["steps"]
    for channel in _remembering(reducer):
        for kept in (channel.residual, channel.owed, channel.momentum):
            if kept is not None:
                kept.value.zero_()
        device = channel.bucket.device
        names = [name for name, _ in channel.bucket.parameters]
        channel.memory = {name: memory[name].to(device, copy=True) for name in names if name in memory}
        if exact:
            _take(channel, by_rank[wire.rank], exact=True)
            continue
        for rank in range(channel.wire.rank, len(every), channel.wire.ranks):
            _take(channel, by_rank[rank], exact=False)


def _remembering(reducer: Reducer) -> list[Channel]:
    return [found for channel in reducer.channels if (found := channel.remembers) is not None]


def _shares(reducer: Reducer) -> list[dict[str, Any]]:
    return [channel.shares for channel in reducer.channels if channel.shares is not None]


def _same_layout(state: dict[str, Any], reducer: Reducer, wire: Wire) -> bool:
    return (state["ranks"], state["shares"]) == (wire.ranks, _shares(reducer))


def _take(channel: Channel, state: dict[str, Any], *, exact: bool) -> None:
    if channel.residual is None:
        return
    _add_by_parameter(channel, channel.residual, state["residuals"])
    _add_by_parameter(channel, channel.momentum, state["momenta"])
    owed = {name: state["owed"][name] for name, _ in channel.bucket.parameters if name in state["owed"]}
    if not owed:
        return
    places = {name: (first, part.numel()) for name, (first, part) in owed.items()}
    flat = torch.empty(_own_frame(channel)[1], device=channel.bucket.device)
    own_parts = list(_owned_parts(channel, flat))
    if exact and places == {name: (first, part.numel()) for name, first, part in own_parts}:
        for name, _, part in own_parts:
            part.copy_(owed[name][1])
        channel.restore_owed(flat)
        return
    # Another layout of slices: what this rank owed as an owner, it now owes as a sender.
    start = 0
    for name, begin, numel in channel.bucket.parts:
        if name in owed:
            first, part = owed[name]
            low, high = max(first, begin), min(first + part.numel(), begin + numel)
            if low < high:
                place = start + low - begin
                channel.residual.value[place : place + high - low] += part[low - first : high - first].to(flat.device)
        start += numel


def _by_parameter(channel: Channel, kept: Residual | None) -> dict[str, Tensor]:
    """Each parameter's part of what is kept, in its shape."""
    if kept is None:
        return {}
    found = {}
    for (name, parameter), part, (_, first, numel) in _split(channel, kept):
        whole = torch.zeros(parameter.numel())
        whole[first : first + numel] = part
        found[name] = whole.view(parameter.shape)
    return found


def _add_by_parameter(channel: Channel, kept: Residual | None, saved: dict[str, Tensor]) -> None:
    if kept is None:
        return
    for (name, _), part, (_, first, numel) in _split(channel, kept):
        if name in saved:
            part += saved[name].reshape(-1)[first : first + numel].to(part.device)


def _split(channel: Channel, kept: Residual) -> Iterator[tuple[tuple[str, Parameter], Tensor, tuple[str, int, int]]]:
    bucket = channel.bucket
    return zip(bucket.parameters, kept.value.split(list(bucket.sizes)), bucket.parts, strict=True)


def _own_frame(channel: Channel) -> tuple[int, int]:
    """First element and length of this rank's slice of the bucket."""
    wire = channel.wire
    slices = channel.bucket.frame(0, wire.ranks, wire.rank).slices()
    return sum(piece.numel for piece in slices[: wire.rank]), slices[wire.rank].numel


def _owned_parts(channel: Channel, owned: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """(name, first element within the parameter, part of `owned`) of each parameter in this rank's slice."""
    begin, length = _own_frame(channel)
    start = 0
    for name, first, numel in channel.bucket.parts:
        low, high = max(begin, start), min(begin + length, start + numel)
        if low < high:
            yield name, first + low - start, owned[low - begin : high - begin]
        start += numel


def _check(states: Sequence[dict[str, Any]], reducer: Reducer, wire: Wire) -> None:
    if not states or any(state.get("version") != VERSION for state in states):
        raise ValueError(f"not compressor states of version {VERSION}; start without them")
    saved, ranks = states[0]["ranks"], sorted(state["rank"] for state in states)
    complete = ranks == list(range(saved))
    if not complete and (not _same_layout(states[0], reducer, wire) or wire.rank not in ranks):
        raise ValueError(
            f"these are the states of ranks {ranks} out of {saved}, and there are {wire.ranks} now, or other shares "
            "of nodes: give the list of all ranks' states"
        )
    shapes = {
        name: parameter.shape
        for channel in reducer.channels
        if channel.bucket.compressor.error_feedback
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
