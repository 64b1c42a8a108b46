"""Packs as large as memory allows: the search, the trial that leaves no trace, and a step that is done over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hvd_novel import comm
from hvd_novel.config import ComputeConfig
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.model.attention import IMPLEMENTATION
from hvd_novel.sharding.packing import Pack, collate
from hvd_novel.sharding.spans import Span
from hvd_novel.train import budget, memory, run
from hvd_novel.train.budget import MemoryBudget, largest_pack
from hvd_novel.train.step import pack_loss
from tests.launch import run as launch

COMPUTE = ComputeConfig(device="cpu")
REFUSED = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: Error code 12"
DOCUMENTS = [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=IMPLEMENTATION["sdpa"]).train()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models wait for their threads more than they gain by them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def packs(store: Path) -> list[Pack]:
    split = TokenStore.open(store).split("train")
    return [collate(split, [Span(d, 0, int(split.lengths[d])) for d in documents]) for documents in DOCUMENTS]


class Scarce:
    """Sums gradients, and cannot get memory for the backward pass of a pack of more than `tokens`."""

    def __init__(self, model: LlamaForCausalLM, tokens: int) -> None:
        self.model, self.tokens, self.trained = model, tokens, [0]

    def __call__(self, packs: Iterable[Pack]) -> float:
        total = 0.0
        self.trained = []
        for pack in packs:
            loss = pack_loss(self.model, pack, COMPUTE)
            if len(pack.input_ids) > self.tokens:
                # The head and half of the layers have their gradients by then.
                layer = self.model.base_model.layers[1]
                loss.backward(inputs=[*self.model.lm_head.parameters(), *layer.parameters()])
                raise RuntimeError(REFUSED)
            loss.backward()
            self.trained.append(len(pack.input_ids))
            total += float(loss.detach())
        return total


def gradient(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("tokens", [10**6, 512, 256])
def test_a_step_that_runs_out_of_memory_has_the_same_gradient(tokens: int, packs: list[Pack]) -> None:
    sizes = [len(pack.input_ids) for pack in packs]
    assert sizes[0] <= 512 < max(sizes), "the first pack was meant to be trained before one fails"
    plain = make_model()
    loss = Scarce(plain, 10**6)(packs)
    model = make_model()
    scarce = Scarce(model, tokens)
    own = MemoryBudget(model, cap=800, longest=256)
    assert own.run(scarce, iter(packs)) == pytest.approx(loss, rel=1e-6)
    assert (gradient(model) - gradient(plain)).norm() <= 1e-6 * gradient(plain).norm()
    assert sum(scarce.trained) == sum(sizes)
    assert own.changed == (tokens < 800)
    if tokens < 800:
        assert max(scarce.trained) <= tokens
        assert 256 <= own.cap < max(sizes), "and smaller packs in the next steps"
    own.check()


def test_a_document_that_does_not_fit_alone_is_told_after_the_exchange(packs: list[Pack]) -> None:
    model = make_model()
    own = MemoryBudget(model, cap=800, longest=256)
    assert own.run(Scarce(model, 100), iter(packs)) == 0.0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert own.changed
    with pytest.raises(UserError, match=r"a sample of \d+ tokens does not fit .*gradient_checkpointing"):
        own.check()


def test_other_errors_pass(packs: list[Pack]) -> None:
    def fail(packs: Iterable[Pack]) -> float:
        next(iter(packs))
        raise RuntimeError("shapes differ")

    own = MemoryBudget(make_model(), cap=800, longest=256)
    with pytest.raises(RuntimeError, match="shapes differ"):
        own.run(fail, iter(packs))
    assert not own.changed


@given(st.integers(1, 500), st.integers(0, 20_000), st.integers(0, 20_000))
@settings(max_examples=200, deadline=None)
def test_the_search_ends_near_what_fits(smallest: int, more: int, room: int) -> None:
    largest, limit = smallest + more, smallest + room
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = budget._search(fits, smallest, largest)
    assert smallest <= found <= min(limit, largest)
    assert len(tried) < 40
    assert max(tried, default=0) <= largest
    if limit >= largest:
        assert found == largest
    else:
        assert found >= int(0.9 * (limit - 1) * 8 / 9) - 1


def test_the_trial_leaves_no_trace() -> None:
    model = make_model()
    model.config.attention_dropout = 0.5  # draws random numbers
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert largest_pack(model, COMPUTE, longest=64, most=300, shared_by=1) == 300
    assert torch.equal(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_on_cpus_the_peak_is_foretold_and_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    tried: list[int] = []

    def fake_loss(model: LlamaForCausalLM, pack: Pack, compute: ComputeConfig) -> torch.Tensor:
        tried.append(len(pack.input_ids))
        return sum(parameter.sum() for parameter in model.parameters())

    monkeypatch.setattr(budget, "pack_loss", fake_loss)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 10**9)
    monkeypatch.setattr(memory, "peak_bytes", lambda: 10**9 + weights + 5000 + 1000 * tried[-1])
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * weights + 4 * 10**6)
    # Nine tenths of what there is, without four copies of the weights and their gradients, hold 4,500 tokens more.
    room = 0.9 * (10 * weights + 4 * 10**6) - 5 * weights
    found = largest_pack(model, COMPUTE, longest=64, most=10**6, shared_by=1)
    assert 0.75 * room < 1000 * found <= max(tried) * 1000 <= room
    shared = largest_pack(model, COMPUTE, longest=64, most=10**6, shared_by=100)
    assert shared == 64, "a hundredth leaves no room for anything"


def test_a_process_limit_bounds_the_trial(tmp_path: Path) -> None:
    finished = launch([sys.executable, str(Path(__file__).with_name("limited_memory_worker.py"))], timeout=120)
    assert finished.code == 0, finished.output
    assert finished.output.splitlines()[-1] == "bounded, trained, too long", finished.output


def test_what_control_groups_leave(tmp_path: Path) -> None:
    for folder, limit, used in [
        ("memory/job", "memory.limit_in_bytes 1000", "memory.usage_in_bytes 400"),
        ("memory", "memory.limit_in_bytes 9000", "memory.usage_in_bytes 500"),
        ("a/b", "memory.max max", "memory.current 100"),
        ("a", "memory.max 700", "memory.current 600"),
    ]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in (limit, used):
            name, value = file.split()
            (tmp_path / folder / name).write_text(value + "\n")
        (tmp_path / folder / "memory.stat").write_text("anon 7\ninactive_file 5\nactive_file 2\n")
    with (tmp_path / "memory" / "memory.stat").open("a") as version_1:
        version_1.write("total_inactive_file 50\ntotal_active_file 20\n")
    groups = "4:memory:/job\n3:cpu:/a\n0::/a/b\n"
    assert sorted(memory.left_in_groups(groups, tmp_path)) == [107, 607, 8570]
    assert list(memory.left_in_groups("0::/\n", tmp_path / "nothing")) == []
    assert 0 < memory.available_bytes() < 2**50


@pytest.mark.parametrize(("world_size", "tried"), [(2, 0), (3, 1)])
def test_caps_of_a_checkpoint_hold_for_as_many_ranks(
    world_size: int, tried: int, monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path]
) -> None:
    trials: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "largest_pack", lambda *_, **options: trials.append(options) or 900)
    monkeypatch.setattr(comm, "together", lambda action, name: action())
    monkeypatch.setattr(comm, "all_gather_object", lambda value, name: [value, value - 100])
    config = run.load_config(write_config(batch={"tokens": 1500, "micro_batch_tokens": "auto"}), [])
    found = SimpleNamespace(facts={"world_size": world_size}, trainer=lambda: {"caps": [400, 500]})
    store = TokenStore.open(Path(config.data.store))
    topology = comm.Topology(rank=1, size=2, local_rank=1, local_size=2)
    caps, own = run._caps(config, make_model(), store, topology, found)  # type: ignore[arg-type]
    assert caps == ([900, 800] if tried else [400, 500])
    assert own is not None
    assert own.cap == caps[1]
    longest = run.longest_sample(store)
    assert [(t["longest"], t["most"], t["shared_by"]) for t in trials] == [(longest, 750 + longest, 2)] * tried
    assert budget.agree(900, alike=True) == [800, 800]
