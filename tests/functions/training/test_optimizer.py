"""The optimiser: its learning rate by hand and against transformers, its weight decay and parameter groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from fakes.tiny_learner import plain_adamw
from rlhfless.algorithms.passes import learning_rate
from rlhfless.functions.training.optimizer import ShardedAdamW
from rlhfless.spec import AdamWSpec


def rates(planned: int, **settings: object) -> list[float]:
    spec = AdamWSpec(learning_rate=1.0, **settings)
    return [learning_rate(spec, update, planned) for update in range(1, planned + 3)]


def test_learning_rates_by_hand() -> None:
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(4, rate_schedule="linear") == [1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(4, rate_schedule="linear", warmup_steps=2, rate_floor=0.2) == pytest.approx([0.5, 1, 1, 0.6, 0.2, 0.2])
    cosine = rates(4, rate_schedule="cosine", rate_floor=0.5)
    half = np.sqrt(0.5)
    assert cosine == pytest.approx([1, 0.75 + 0.25 * half, 0.75, 0.75 - 0.25 * half, 0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_learning_rates_fall_as_those_of_transformers(name, theirs) -> None:
    """After the warm-up, whose first update is 0 there."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = theirs(optimizer, 5, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(40, rate_schedule=name, warmup_steps=5)[5:40] == pytest.approx(expected[5:], abs=1e-12)


def made() -> tuple[torch.nn.Module, ShardedAdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    return model, ShardedAdamW(model, AdamWSpec(learning_rate=0.5, weight_decay=0.2))


def test_weight_decay_is_for_matrices_alone() -> None:
    model, optimizer = made()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert optimizer.step(norm=0.0, planned=1) == 0.5
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.2 if parameter.ndim > 1 else 1)
        torch.testing.assert_close(parameter.detach(), expected)


def test_groups_are_those_of_a_plain_optimizer() -> None:
    model, optimizer = made()
    groups, plain = optimizer._adamw.param_groups, plain_adamw(model, optimizer._spec).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(p) for p in g["params"]] for g in plain]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
