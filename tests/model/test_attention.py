"""Packed documents stay apart: loss, gradients, positions and logits as if each were alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hvd_novel.errors import UserError
from hvd_novel.model import attention, build
from hvd_novel.model.loss import IGNORE, cross_entropy_sum

LENGTHS = [7, 1, 12, 5]
TYPES = {
    "llama": {},
    "llama, grouped queries": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"num_key_value_heads": 2},
    "mistral": {"sliding_window": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def make(kind: str, dtype: torch.dtype = torch.float64, **keys: object) -> PreTrainedModel:
    name = kind.split(",")[0]
    sizes = {} if name == "gpt2" else SIZES
    config = AutoConfig.for_model(name, vocab_size=97, **{**sizes, **TYPES[kind], **keys})
    torch.manual_seed(0)
    implementation = attention.IMPLEMENTATION["sdpa"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return (_all_fp64(model) if dtype == torch.float64 else model).eval()


def _all_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """Replace transformers' RMS norms, which compute in fp32 whatever they are given."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                setattr(parent, name, norm)
    return model


def documents(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def labels_of(document: torch.Tensor) -> torch.Tensor:
    return torch.cat([document[1:], torch.tensor([IGNORE])])


def packed_loss(model: PreTrainedModel, docs: list[torch.Tensor], chunk: int = 4) -> torch.Tensor:
    hidden = build.hidden_states(model, build.pack_inputs(torch.cat(docs), [len(d) for d in docs], model.device))
    return cross_entropy_sum(hidden, torch.cat([labels_of(d) for d in docs]), build.head(model), chunk)


def reference_loss(model: PreTrainedModel, docs: list[torch.Tensor]) -> torch.Tensor:
    """Plain transformers, one document at a time, with its own attention."""
    model.set_attn_implementation("sdpa")
    losses = [cross_entropy(model(d[None]).logits[0, :-1], d[1:], reduction="sum") for d in docs if len(d) > 1]
    model.set_attn_implementation(attention.IMPLEMENTATION["sdpa"])
    return torch.stack(losses).sum()


def gradient(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_packed_equals_one_document_at_a_time(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model, docs = make(kind, dtype), documents()
    packed, apart = packed_loss(model, docs), reference_loss(model, docs)
    assert relative(packed.detach(), apart.detach()) < tolerance
    assert relative(gradient(model, packed_loss(model, docs)), gradient(model, apart)) < tolerance


def test_gradient_checkpointing_changes_nothing() -> None:
    model, docs = make("llama"), documents()
    plain = gradient(model, packed_loss(model, docs))
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert relative(gradient(model.train(), packed_loss(model, docs)), plain) < 1e-12


def test_positions_restart_and_cu_seqlens_are_int32() -> None:
    inputs = build.pack_inputs(torch.arange(25), LENGTHS, torch.device("cpu"))
    assert inputs["position_ids"][0].tolist() == [*range(7), 0, *range(12), *range(5)]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["cu_seq_lens_q"].tolist() == [0, 7, 8, 20, 25]
    assert inputs["max_length_q"] == 12


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_no_document_sees_another(changed: int) -> None:
    """Change one document: the others' logits stay bitwise equal."""
    model = make("llama", torch.float32)
    docs, others = documents(), documents(seed=2)
    altered = [others[i] if i == changed else d for i, d in enumerate(docs)]
    with torch.no_grad():
        before = build.logits(model, torch.cat(docs), LENGTHS).split(LENGTHS)
        after = build.logits(model, torch.cat(altered), LENGTHS).split(LENGTHS)
    for index in range(len(LENGTHS)):
        assert torch.equal(before[index], after[index]) == (index != changed)


def test_no_gradient_flows_between_documents() -> None:
    model, docs = make("llama"), documents()
    inputs = build.pack_inputs(torch.cat(docs), LENGTHS, model.device)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    hidden = build.hidden_states(model, {**inputs, "inputs_embeds": embedded})
    labels = torch.cat([labels_of(d) if i == 2 else torch.full_like(d, IGNORE) for i, d in enumerate(docs)])
    cross_entropy_sum(hidden, labels, build.head(model), 4).backward()
    by_document = embedded.grad[0].split(LENGTHS)
    assert [bool((part != 0).any()) for part in by_document] == [False, False, True, False]


@pytest.mark.parametrize("name", build.ARCHITECTURES)
def test_every_architecture_allowed_trains_what_transformers_computes(name: str) -> None:
    """With large weights, so that scaled or capped logits, lost positions or a look ahead cannot hide."""
    sizes = {"gpt2": TYPES["gpt2"], "opt": OPT}.get(name) or SIZES | _grouped_queries(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=97, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION["sdpa"]).eval()
    docs = documents()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        ours = build.logits(model, torch.cat(docs), LENGTHS)
        model.set_attn_implementation("eager")
        theirs = [model(document[None]).logits[0] for document in docs]
        changed = docs[2].clone()
        changed[-1] = (changed[-1] + 1) % 97
        after = model(changed[None]).logits[0]
    assert relative(ours, torch.cat(theirs)) < 1e-5
    torch.testing.assert_close(after[:-1], theirs[2][:-1], msg="a token sees a later one")


OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}


def _grouped_queries(name: str) -> dict[str, int]:
    defaults = AutoConfig.for_model(name)
    return {key: size for key, size in {"num_key_value_heads": 2, "head_dim": 8}.items() if hasattr(defaults, key)}


@pytest.mark.parametrize("name", ["cohere", "gemma2", "granite", "bert-generation", "mixtral", "mamba", "falcon"])
def test_others_are_refused_with_the_nearest(name: str) -> None:
    ((key, problem),) = build.architecture_problems({"type": name})
    assert key == "type"
    assert "not among the architectures known to train right" in problem


@pytest.mark.parametrize("name", ["flash", "torch-varlen"])
def test_a_backend_that_cannot_run_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=f"compute.attention={name} cannot be used: the device is a CPU"):
        attention.choose(name, torch.device("cpu"), "bf16")


def test_automatic_choice_names_its_reason() -> None:
    backend, reason = attention.choose("auto", torch.device("cpu"), "fp32")
    assert backend == "sdpa"
    assert "no flash: the device is a CPU" in reason
