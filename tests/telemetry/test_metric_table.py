"""The table of metrics: every name once, with its unit, and no name beside it."""

from __future__ import annotations

import re

import pytest
import torch
from pydantic import TypeAdapter

from rlhfless.algorithms.base import BUILT_IN, LossInputs, algorithm_of, common_metrics
from rlhfless.scaling.accounting import Phase
from rlhfless.spec import AlgorithmSpec
from rlhfless.telemetry.metrics import METRICS, Kind, Metric, UndeclaredMetric, Unit, resolve


@pytest.mark.parametrize(
    ("name", "prometheus"),
    [
        ("step_s", "rlhfless_step_seconds"),
        ("generation_tokens_per_s", "rlhfless_generation_tokens_per_second"),
        ("response_tokens_mean", "rlhfless_response_tokens_mean"),
        ("cost_usd", "rlhfless_cost_usd"),
        ("truncated", "rlhfless_truncated_ratio"),
        ("reward_mean", "rlhfless_reward_mean"),
        ("reference_kl", "rlhfless_reference_kl_nats"),
    ],
)
def test_prometheus_names_carry_the_unit_once(name: str, prometheus: str) -> None:
    assert METRICS[name].prometheus_name == prometheus


def test_every_declaration_is_sound() -> None:
    names = [metric.prometheus_name for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    for metric in METRICS.values():
        assert re.fullmatch(r"rlhfless_[a-z0-9_]+", metric.prometheus_name)
        assert metric.help
        assert (metric.unit is Unit.SECONDS) == (metric.name.endswith("_s") and "_per_" not in metric.name)


def test_plain_names_and_families_resolve() -> None:
    assert resolve("reward_mean") == (METRICS["reward_mean"], None)
    assert resolve("reward/exact_match") == (METRICS["reward"], "exact_match")
    assert resolve("eval/exact_match_greedy") == (METRICS["eval"], "exact_match_greedy")
    assert resolve("reward/a/b") == (METRICS["reward"], "a/b")


@pytest.mark.parametrize("name", ["reward", "reward/", "reward_mean/x", "nonsense", "", "/x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UndeclaredMetric):
        resolve(name)


def test_the_refusal_says_what_was_meant() -> None:
    with pytest.raises(UndeclaredMetric, match=r"'reward_meen' is not declared; did you mean 'reward_mean'\?"):
        resolve("reward_meen")


def test_every_phase_of_a_step_within_it_has_a_metric() -> None:
    for phase in Phase:
        if phase is not Phase.HELD_OUT:  # evaluations lie between steps
            assert f"{phase}_s" in METRICS


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_each_loss_reports_is_declared(name: str) -> None:
    zeros = torch.zeros(3)
    inputs = LossInputs(
        logprobs=zeros.clone().requires_grad_(),
        entropy=zeros,
        rollout_logprobs=zeros,
        advantages=torch.ones(3),
        denominator_tokens=3,
        sequence_id=torch.tensor([0, 0, 1]),
        denominator_sequences=2,
        reference_logprobs=zeros,
    )
    settings = {"type": name, "kl": {"coefficient": 0.1}, "rejection": {}, "entropy_bonus": 0.1}
    of_the_algorithm = algorithm_of(TypeAdapter(AlgorithmSpec).validate_python(settings)).loss(inputs).metrics
    for metric in (*common_metrics(inputs), *of_the_algorithm, "loss"):
        assert resolve(metric)[0].kind is Kind.GAUGE


def test_a_metric_without_a_unit_keeps_its_name() -> None:
    assert Metric("actors", Unit.NONE, "help").prometheus_name == "rlhfless_actors"
