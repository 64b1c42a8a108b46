"""What a span costs: linear * L + quadratic * L² + span, for a span of L tokens.

The first coefficients come from the model: FLOP of the matrices, which grow with L, and of causal attention, which
grow with L². They are then fitted to measured times of packs, in seconds. Only ratios of costs matter to the plan.
The constant is counted for each span and not for each pack: only then is the cost of a set of spans the sum of
theirs, whatever packs they end up in; what a pack itself costs is nearly proportional to tokens, as packs are full.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

_FIRST_REFIT = 50
_WARM_UP = 3  # steps after each start whose times are not used: compilation, caches, memory pools
_KEPT = 512  # newest measurements of a rank that a fit uses
_FEWEST = 16  # measurements of all ranks below which there is no fit
_MODEL_ERROR = 0.5  # relative, of the model's coefficients
_HUBER = 1.345  # in robust standard deviations: beyond it a measurement loses weight (Huber 1964)


class Cost(NamedTuple):
    """The three coefficients, none negative."""

    linear: float
    quadratic: float
    span: float

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """The cost of spans of `lengths` tokens, float64 of the same shape."""
        tokens = lengths.astype(np.float64)
        return tokens * self.linear + tokens * tokens * self.quadratic + self.span


class Measured(NamedTuple):
    """How long one pack took, forward and backward."""

    tokens: int
    squares: int
    """Sum of the squared lengths of its spans."""
    spans: int
    seconds: float


TOKENS = Cost(1.0, 0.0, 0.0)


def from_model(model: PreTrainedModel, longest: int) -> Cost:
    """FLOP of a forward and a backward pass: 6 per weight and token, and attention to all tokens before.

    In layers with a sliding window shorter than `longest`, the longest span in tokens, attention grows linearly.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    embeddings -= {id(head.weight)} if head is not None else set()
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings)
    linear, quadratic = 6.0 * matrices, 0.0
    for window in _windows(config):
        if window is None or window >= longest:
            quadratic += 6.0 * width  # 2 products of 2 FLOP, backward twice that, and half of it is masked
        else:
            linear += 12.0 * width * (window - window**2 / (2 * longest))
    return Cost(linear, quadratic, 0.0)


def _windows(config: object) -> list[int | None]:
    """The sliding window of each layer in tokens, None where attention sees everything before."""
    layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


class CostModel:
    """The cost in force, and the measurements for the next fit.

    `initial` are the model's coefficients; fits are due after step 50 and every `refit_every` steps (0: never).
    """

    def __init__(self, initial: Cost, refit_every: int) -> None:
        self.initial, self.cost, self._every = initial, initial, refit_every
        self._measured: deque[Measured] = deque(maxlen=_KEPT)
        self._steps = 0

    def observe(self, packs: Sequence[Measured]) -> None:
        """Take the times of this rank's packs of one step.

        The last pack's backward pass also compresses gradients: it counts only if it is alone.
        """
        self._steps += 1
        if self._every and self._steps > _WARM_UP:
            self._measured.extend(packs[:-1] if len(packs) > 1 else packs)

    def due(self, step: int) -> bool:
        """Whether all ranks fit after `step` steps of the run."""
        return self._every > 0 and (step % self._every == 0 or step == min(_FIRST_REFIT, self._every))

    @property
    def measured(self) -> list[Measured]:
        """This rank's newest measurements."""
        return list(self._measured)

    def refit(self, measured: Iterable[Measured]) -> Cost:
        """The cost that explains the measurements of all ranks best; without enough of them, the one in force."""
        return best_fit(list(measured), self.initial) or self.cost


def best_fit(measured: Sequence[Measured], initial: Cost) -> Cost | None:
    """A robust fit in seconds, or what explains the times better: `initial` or plain tokens, scaled to seconds.

    Times that are not finite or not positive are left out; None if fewer than 16 are left.
    """
    rows = np.array([m for m in measured if np.isfinite(m.seconds) and m.seconds > 0 and m.tokens > 0], np.float64)
    if len(rows) < _FEWEST:
        return None
    relative = rows[:, :3] / rows[:, 3:]  # so that short packs count as much as long ones
    model = _scaled(relative, initial)
    fitted = _robust(relative, _expected(model, rows[:, 0].sum() / rows[:, 2].sum()))
    candidates = [*([fitted] if fitted is not None else []), model, _scaled(relative, TOKENS)]
    errors = [float(np.median(np.abs(relative @ np.array(cost) - 1))) for cost in candidates]
    return candidates[int(np.argmin(errors))]


def _expected(model: Cost, length: float) -> np.ndarray:
    """What `model` says of spans about as long as `length`, as rows ``row @ cost = 1``, [3, 3]."""
    lengths = length * np.array([0.25, 1.0, 4.0])
    return np.stack([lengths, lengths**2, np.ones(3)], axis=1) / model.of(lengths)[:, None]


def _robust(relative: np.ndarray, expected: np.ndarray) -> Cost | None:
    """Iteratively reweighted least squares for ``relative @ cost = 1`` with no negative coefficient.

    Packs that are all alike cannot tell the coefficients apart: `expected` decides what times leave open. It is taken
    to be right to within a half, which does not count against times that agree among themselves.
    """
    scale = relative.mean(axis=0)  # the features differ by many orders of magnitude
    features, weights, deviation = relative / scale, np.ones(len(relative)), 0.1
    solution = None
    for _ in range(20):
        trust = deviation / _MODEL_ERROR
        solution = _non_negative(
            np.concatenate([features * weights[:, None], expected / scale * trust]),
            np.concatenate([weights, np.full(len(expected), trust)]),
        )
        if solution is None:
            return None
        residual = np.abs(features @ solution - 1)
        deviation = max(1.4826 * float(np.median(residual)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, _HUBER * deviation / np.maximum(residual, 1e-12)))
    return Cost(*(float(value) for value in solution / scale)) if solution is not None else None


def _non_negative(features: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Least squares without negative coefficients: with three of them, the best of all subsets."""
    best, best_error = None, np.inf
    for size in (3, 2, 1):
        for chosen in itertools.combinations(range(3), size):
            part = np.linalg.lstsq(features[:, chosen], target, rcond=1e-9)[0]
            error = float(np.sum((features[:, chosen] @ part - target) ** 2))
            if np.isfinite(part).all() and (part >= 0).all() and part.any() and error < best_error:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = part
    return best


def _scaled(relative: np.ndarray, cost: Cost) -> Cost:
    """`cost` in seconds."""
    factor = 1.0 / float(np.median(relative @ np.array(cost)))
    return Cost(*(value * factor for value in cost))
