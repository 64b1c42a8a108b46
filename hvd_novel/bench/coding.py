"""What encoding and decoding cost, in passes of a plain copy over the same memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import compressors
from compressors import kernels
from compressors.codec import Codec, Frame

CODECS: dict[str, dict[str, Any]] = {
    "onebit": {},
    "topk": {"density": 0.01, "values": "float16"},
    "int8": {},
}


def passes(numel: int, rounds: int, device: str = "cpu") -> dict[str, dict[str, float]]:
    """For each of CODECS: encode, decode and both, as multiples of the time of a copy; and a copy's milliseconds.

    One thread, float32 tensors of `numel` elements in memory that is there already; medians of `rounds` interleaved
    rounds. Encoding begins with adding the residual, and leaves the new one; decoding writes all elements. On CPUs
    the process's time is measured, on a "cuda" `device` that between events before and after (gaps between kernels,
    while the host starts them, are in it).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _passes(numel, rounds, torch.device(device))
    finally:
        torch.set_num_threads(threads)


def _passes(numel: int, rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    residual, draft, out = (torch.zeros(numel, device=device) for _ in range(3))
    frame = Frame((numel,), step=1, ranks=1)
    actions: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(gradient)}
    for name, options in CODECS.items():
        codec = compressors.get(name, **options)
        assert isinstance(codec, Codec)
        encode = _encoding(codec, gradient, residual, draft, frame)
        payload = encode()
        actions[f"{name} encode"] = encode
        actions[f"{name} decode"] = partial(codec.decode_into, payload, frame, out)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seconds[name].append(_seconds(action, device))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    result = {"copy": {"milliseconds": 1000 * median["copy"]}}
    for name in CODECS:
        encode_passes, decode_passes = (median[f"{name} {way}"] / median["copy"] for way in ("encode", "decode"))
        result[name] = {"encode": encode_passes, "decode": decode_passes, "both": encode_passes + decode_passes}
    return result


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        action()
        return time.process_time() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    action()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000


def _encoding(
    codec: Codec, gradient: torch.Tensor, residual: torch.Tensor, draft: torch.Tensor, frame: Frame
) -> Callable[[], torch.Tensor]:
    if isinstance(codec, compressors.OneBit):
        return partial(_encode_signs, codec, gradient, residual, draft, frame)
    if not codec.error_feedback:
        return partial(codec.encode_in, gradient, frame, torch.empty(codec.nbytes(frame), dtype=torch.uint8))

    def encode() -> torch.Tensor:
        kernels.clear_unless_finite(draft, [kernels.add_scaled(gradient, 1.0, residual, draft)])
        return codec.encode_error(draft, frame)

    return encode


def _encode_signs(
    codec: compressors.OneBit, gradient: torch.Tensor, residual: torch.Tensor, draft: torch.Tensor, frame: Frame
) -> torch.Tensor:
    """As `channels.OneBitChannel` does it."""
    payload = torch.empty(codec.nbytes(frame), dtype=torch.uint8, device=gradient.device)
    scales, bits = codec.fields(payload, frame)
    sent = torch.ones(1, device=gradient.device)
    sums = kernels.load_signs([gradient], 1.0, residual, sent, draft, bits)
    scales.copy_(kernels.means(kernels.clear_unless_finite(draft, sums)[0], frame.sizes))
    return payload
