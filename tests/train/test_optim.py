"""Parameter groups and the learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hvd_novel.config import OptimizerConfig, ScheduleConfig
from hvd_novel.train.optim import learning_rate, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_with_its_own_decay(tied: bool) -> None:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    groups = parameter_groups(
        model, OptimizerConfig(weight_decay=0.3, embedding_weight_decay=0.2, norm_weight_decay=0.1)
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert by_decay[0.2] == {"model.embed_tokens.weight"}
    assert all("norm" in name or name.endswith("bias") for name in by_decay[0.1])
    assert ("lm_head.weight" in by_decay[0.3]) is not tied
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_empty_groups_are_left_out() -> None:
    groups = parameter_groups(torch.nn.Linear(3, 3, bias=False), OptimizerConfig())
    assert [group["name"] for group in groups] == ["matrices"]


def test_schedule_warms_up_peaks_and_ends_at_the_minimum() -> None:
    schedule = ScheduleConfig(steps=110, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, 2.0, schedule) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[109] == pytest.approx(0.2)
    assert rates[59] == pytest.approx(0.5 * (rates[10] + rates[109]), rel=0.02)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_schedule_without_warmup_and_of_one_step() -> None:
    assert learning_rate(0, 2.0, ScheduleConfig(steps=1)) == 2.0
    assert learning_rate(0, 2.0, ScheduleConfig(steps=5)) == 2.0
