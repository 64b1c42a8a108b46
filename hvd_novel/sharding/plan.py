"""The plan: which documents form a step, and how they are dealt to replicas and packed.

A pure function of the store, seed, step, token budget, curriculum, strategy, cost, caps and number of replicas:
resuming needs nothing but the step, the cost and the caps. Which documents form a step depends neither on cost nor
on caps, and, but for the strategy `greedy`, not on the number of replicas.

Two levels. A step takes the next contiguous slice of the epoch's order, sized by the token budget. Inside it
documents longer than the smallest cap are cut into spans, spans go to replicas longest first, each to the least
loaded, replicas exchange some until they are even, and best-fit-decreasing packs them inside a replica.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvd_novel import comm
from hvd_novel.errors import UserError
from hvd_novel.sharding import kernels
from hvd_novel.sharding.cost import TOKENS, Cost
from hvd_novel.sharding.curriculum import Curriculum
from hvd_novel.sharding.order import KeyOrder
from hvd_novel.sharding.packer import pack
from hvd_novel.sharding.spans import Span
from hvd_novel.sharding.strategies import STRATEGIES, consumed_together, greedy_owners

Packs = list[list[Span]]


class Column(Protocol):
    """Numbers of all documents, read for some of them."""

    def __getitem__(self, documents: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step trains."""

    epoch: int
    documents: np.ndarray = field(compare=False)  # the checksum covers them
    """The documents of the step, int32, ascending; empty ones are among them, but in no pack."""
    packs: Sequence[Packs]
    """packs[replica][i]: the spans of that replica's i-th pack; a replica may have none."""
    costs: list[list[float]]
    """costs[replica][i]: the modelled cost of that pack."""
    tokens: int
    """All tokens of the step, over all replicas."""
    trained_tokens: int
    """Labels trained in this step over all replicas: the divisor of its loss."""
    checksum: int
    """20 bits that differ between different plans of a step, but for one in a million."""


class Plan:
    """Steps over a split of a token store; every document is trained once in each epoch.

    `lengths` int32 [documents] are tokens; of each document the first `context` tokens (at least one) are no labels.
    A step holds about `step_tokens` tokens: all steps of an epoch are equally large to within one document, a
    document of more tokens has a step almost to itself. `cost` may be replaced between steps, alike on all ranks.
    Raises UserError if there is nothing to train.

    The epoch's order lies in memory that the ranks of a node share: with a curriculum or the strategy `greedy` from
    the epoch's first step on, which all ranks must ask for together; otherwise from `settle` on.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        context: Column,
        *,
        seed: int,
        step_tokens: int,
        strategy: str = "cost",
        cost: Cost = TOKENS,
        curriculum: Curriculum | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"no strategy {strategy!r}; there are {STRATEGIES}")
        self._total, largest = kernels.weigh(lengths, step_tokens)
        if self._total == 0:
            raise UserError("the token store has no training samples; prepare a larger corpus")
        self.lengths, self.context, self.seed, self.step_tokens = lengths, context, seed, step_tokens
        self.tokens = int(lengths.sum(dtype=np.int64))
        self.strategy, self.cost, self.curriculum = strategy, cost, curriculum
        # A slice not shorter than the longest document holds the end of at least one: no step is empty.
        self.steps_per_epoch = int(max(1, min(-(-self._total // step_tokens), self._total // largest)))
        self._shared = comm.shared_array(len(lengths), np.int32, "plan.order")
        self._entered: tuple[int, int] | None = None
        self._order: KeyOrder | None = None
        self._bounds = np.empty(0, np.int64)
        self._owners: np.ndarray | None = None

    def step(self, step: int, caps: Sequence[int]) -> StepPlan:
        """The plan of optimizer step `step` (from 0) for ``len(caps)`` replicas with packs of at most `caps` tokens.

        Raises ValueError for caps that are not positive, or none.
        """
        if len(caps) == 0 or min(caps) < 1:
            raise ValueError(f"caps must be positive, one for each replica: {list(caps)}")
        documents = self.documents(step, len(caps))
        packed = pack(
            documents,
            self.lengths,
            caps,
            chunk=self.longest_span(step, caps),
            cost=self.cost,
            strategy=self.strategy,
            owners=self._owners,
        )
        documents = np.sort(documents)
        tokens, trained = kernels.trained(documents, self.lengths, self.context[documents])
        return StepPlan(
            epoch=step // self.steps_per_epoch,
            documents=documents,
            packs=packed.packs,
            costs=packed.costs,
            tokens=tokens,
            trained_tokens=trained,
            checksum=zlib.crc32(packed.columns.data, zlib.crc32(documents.data)) & 0xFFFFF,
        )

    def documents(self, step: int, replicas: int) -> np.ndarray:
        """The documents of `step` in the order of the epoch, int32; may be a view that the next epoch writes over."""
        epoch, index = divmod(step, self.steps_per_epoch)
        self._enter(epoch, replicas)
        if self._order is not None:
            documents = self._order.documents(index)
            if self._shared.alone:
                self.settle()
            return documents
        return self._shared.values[self._bounds[index] : self._bounds[index + 1]]

    def settle(self) -> None:
        """Lay out the order of the epoch of the last step, so that its other steps are planned fast.

        To be called by all ranks together, when none of them plans a step of another epoch. A process that is alone
        does it by itself.
        """
        if self._order is not None:
            self._order.settle(self._fill)

    def longest_span(self, step: int, caps: Sequence[int]) -> int:
        """Tokens that a span of `step` has at most."""
        limit = self.curriculum.longest(step) if self.curriculum else None
        return min(limit or min(caps), min(caps))

    def state_dict(self) -> dict[str, Any]:
        """What a run changes, or must not change, in its plan, as JSON values."""
        return {"cost": list(self.cost), "curriculum": self.curriculum.state_dict() if self.curriculum else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`. Raises UserError if the curriculum is another one."""
        if state["curriculum"] != self.state_dict()["curriculum"]:
            raise UserError("the checkpoint was trained with another curriculum; choose another run.dir")
        self.cost = Cost(*state["cost"])

    def _enter(self, epoch: int, replicas: int) -> None:
        """Make the epoch's order and where its steps begin."""
        key = (epoch, replicas if self.strategy == "greedy" else 0)
        if key == self._entered:
            return
        if self.strategy == "greedy" and (self._entered is None or key[1] != self._entered[1]):
            self._owners = greedy_owners(self.lengths, replicas)
        seed = epoch_seed(self.seed, epoch)
        order = KeyOrder(self.lengths, seed=seed, most=self.step_tokens, steps=self.steps_per_epoch, total=self._total)
        if self.curriculum is None and self._owners is None:
            self._order = order
        else:
            self._fill(lambda values: self._arrange(values, order, seed, epoch * self.steps_per_epoch, replicas))
            self._bounds = kernels.step_bounds(
                self._shared.values, self.lengths, self.step_tokens, self.steps_per_epoch, self._total
            )
        self._entered = key

    def _fill(self, write: Callable[[np.ndarray], None]) -> np.ndarray:
        self._shared.fill(write)
        return self._shared.values

    def _arrange(self, values: np.ndarray, order: KeyOrder, seed: int, first_step: int, replicas: int) -> None:
        order.write(values)
        if self.curriculum:
            self.curriculum.arrange(
                values,
                self.lengths,
                seed=seed,
                most=self.step_tokens,
                steps=self.steps_per_epoch,
                total=self._total,
                first_step=first_step,
            )
        if self._owners is not None:
            consumed_together(values, self.lengths, self._owners, replicas)


def epoch_seed(seed: int, epoch: int) -> int:
    """63 random bits for an epoch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "little") >> 1
