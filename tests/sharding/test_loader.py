"""Packs made ahead: those of the plan, whatever was under way when it changed; no thread is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvd_novel.corpus.store import StoreSplit, TokenStore
from hvd_novel.errors import UserError
from hvd_novel.sharding import loader as loader_module
from hvd_novel.sharding.cost import Cost
from hvd_novel.sharding.loader import Loader, check_cores
from hvd_novel.sharding.packing import collate
from hvd_novel.sharding.plan import Plan
from hvd_novel.sharding.spans import Span

CAPS = [600, 600]


@pytest.fixture
def split(store: Path) -> StoreSplit:
    return TokenStore.open(store).split("train")


def plan_of(split: StoreSplit) -> Plan:
    return Plan(split.lengths, split.column("context"), seed=5, step_tokens=1500)


@pytest.fixture
def loader(split: StoreSplit) -> Iterator[Loader]:
    with open_loader(split) as loader:
        yield loader
    assert not threads()


def open_loader(split: StoreSplit, ahead: int = 3, last_step: int = 10**6, **options: list[int]) -> Loader:
    plan = plan_of(split)
    device = torch.device("cpu")
    return Loader(plan, split, replica=1, last_step=last_step, ahead=ahead, device=device, **options)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def take(loader: Loader, step: int, caps: list[int] = CAPS) -> list[list[Span]]:
    loader.step(step, caps)
    return [pack.spans for pack in loader.packs()]


def test_steps_are_those_of_the_plan_over_epochs(loader: Loader, split: StoreSplit) -> None:
    plan = plan_of(split)
    for step in range(2 * plan.steps_per_epoch + 3):
        planned = loader.step(step, CAPS)
        packs = list(loader.packs())
        expected = plan.step(step, CAPS)
        assert planned == expected
        assert [pack.spans for pack in packs] == expected.packs[1]
        want = [collate(split, spans) for spans in expected.packs[1]]
        assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(packs, want, strict=True))
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(packs, want, strict=True))
    assert loader.waited > 0


@pytest.mark.parametrize("ahead", [1, 50])
def test_a_change_makes_void_what_was_made_ahead(ahead: int, split: StoreSplit) -> None:
    plan = plan_of(split)
    with open_loader(split, ahead) as loader:
        take(loader, 0)
        assert take(loader, 1, [300, 300]) == plan.step(1, [300, 300]).packs[1], "other caps"
        assert take(loader, 5, [300, 300]) == plan.step(5, [300, 300]).packs[1], "another step"
        loader.step(6, CAPS)
        assert next(loader.packs()).spans == plan.step(6, CAPS).packs[1][0]
        assert take(loader, 7) == plan.step(7, CAPS).packs[1], "packs left over from the step before"
        assert take(loader, 7) == plan.step(7, CAPS).packs[1], "the same step again"
        loader.discard()
        changed = plan_of(split)
        loader._plan.cost = changed.cost = Cost(1.0, 1.0, 100.0)
        assert loader.step(8, CAPS) == changed.step(8, CAPS) != plan.step(8, CAPS), "another plan"
    assert not threads()


def test_resuming_needs_the_step_alone(split: StoreSplit) -> None:
    with open_loader(split, ahead=40) as whole, open_loader(split, ahead=40) as resumed:
        seen = [take(whole, step) for step in range(9)]
        assert [take(resumed, step) for step in range(4, 9)] == seen[4:]


def test_nothing_is_made_beyond_the_last_step_and_the_epoch(split: StoreSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, bool]] = []
    original = Plan.step

    def spy(plan: Plan, step: int, caps: list[int]) -> object:
        planned.append((step, threading.current_thread().name == "loader"))
        return original(plan, step, caps)

    monkeypatch.setattr(Plan, "step", spy)
    steps = plan_of(split).steps_per_epoch
    with open_loader(split, ahead=10**4, last_step=steps + 2) as loader:
        for step in range(steps + 2):
            take(loader, step)
    assert [step for step, _ in planned] == list(range(steps + 2)), "each once, none beyond"
    assert [step for step, ahead in planned if not ahead] == [0, steps], "the main thread begins each epoch"


def test_an_error_in_the_thread_is_raised_as_it_is(
    loader: Loader, split: StoreSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = plan_of(split).step(1, CAPS).packs[1][0]

    def fail(split: StoreSplit, spans: list[Span]) -> object:
        if spans == bad:
            raise UserError("this file is gone")
        return collate(split, spans)

    monkeypatch.setattr(loader_module, "collate", fail)
    take(loader, 0)
    with pytest.raises(UserError, match="this file is gone"):
        take(loader, 1)
    assert not threads()
    monkeypatch.undo()
    assert take(loader, 1) == plan_of(split).step(1, CAPS).packs[1], "and can be asked again"


def test_closing_while_the_thread_waits_for_room(split: StoreSplit) -> None:
    loader = open_loader(split, ahead=1)
    loader.step(0, CAPS)
    (thread,) = threads()
    loader.close()
    assert not thread.is_alive()
    loader.close()  # again: nothing to do


def test_the_thread_keeps_to_its_cores(split: StoreSplit) -> None:
    core = max(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(0)
    with open_loader(split, ahead=1, cores=[core]) as loader:
        take(loader, 0)
        (thread,) = threads()
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == {core}
    assert os.sched_getaffinity(0) == everywhere, "of the thread alone"


@pytest.mark.parametrize("core", [4000, 10**6])
def test_cores_that_are_not_there_are_refused(core: int) -> None:
    everywhere = os.sched_getaffinity(0)
    check_cores(sorted(everywhere))
    with pytest.raises(UserError, match=f"core {core} cannot be used"):
        check_cores([min(everywhere), core])
    assert os.sched_getaffinity(0) == everywhere


def test_a_pack_in_pieces(split: StoreSplit) -> None:
    pack = collate(split, [Span(document, 0, int(split.lengths[document])) for document in (3, 1, 4, 5, 9)])
    for tokens in (1, max(pack.lengths), 300, 10**6):
        pieces = pack.split(tokens)
        assert [span for piece in pieces for span in piece.spans] == pack.spans
        assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), pack.input_ids)
        assert torch.equal(torch.cat([piece.labels for piece in pieces]), pack.labels)
        assert all(len(piece.lengths) == 1 or sum(piece.lengths) <= tokens for piece in pieces)
        assert all(len(piece.input_ids) == sum(piece.lengths) for piece in pieces)
