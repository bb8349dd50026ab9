"""Number of versions by which the weights of tokens lag, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fakes.fake_cluster import group
from rlhfless.algorithms.base import LossInputs
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.losses import clip_metrics, correction
from rlhfless.orchestrator.experience import by_token, staleness_of
from rlhfless.orchestrator.token_batches import split
from rlhfless.records import Experience, Group, VersionSpan, WeightVersion
from rlhfless.spec import GRPOSpec
from rlhfless.telemetry.metrics import resolve

LEARNER = WeightVersion("run", 2, 7, "d7")


def drawn(name: str, *spans: tuple[int, int, int]) -> Group:
    """Return a group of one sample, with spans (step of the version, first token, end)."""
    (rollout,) = group(name).rollouts
    versions = tuple(VersionSpan(f"run/1/{step}/d{step}", start, end) for step, start, end in spans)
    return Group.of(group(name).prompt, [replace(rollout, version_spans=versions)])


def test_the_mean_is_over_tokens_and_the_oldest_one_is_named() -> None:
    """6 tokens 2 versions behind, 3 tokens 1, 1 token 0: 15 / 10. Versions continue in a resumed run."""
    experience = Experience((drawn("p", (5, 0, 6), (6, 6, 8)), drawn("q", (6, 0, 1), (7, 1, 2))))
    staleness = staleness_of(experience, LEARNER)
    assert staleness is not None
    assert staleness.metrics == {"staleness_mean": pytest.approx(1.5), "staleness_max": 2.0}
    assert staleness.oldest == WeightVersion("run", 1, 5, "d5")


def test_an_engine_that_does_not_say_its_version_has_none() -> None:
    assert staleness_of(Experience((group("p"),)), LEARNER) is None


def test_metrics_are_told_apart_by_the_versions_of_their_tokens() -> None:
    """q is given before p, but pack sorts by prompt id. Prompts have 3 tokens."""
    groups = (drawn("q", (7, 0, 1), (6, 1, 2)), drawn("p", (5, 0, 2)))
    behind = by_token(groups, LEARNER)
    assert behind.tolist() == [0, 0, 0, 2, 2, 0, 0, 0, 0, 1]
    batch = pack(groups).with_columns(staleness=behind)
    assert batch.staleness is not None
    mask = batch.response_mask
    difference = torch.tensor([0.0, 0.5, 0.0, -0.5])  # log ratios of the tokens, 2, 2, 0 and 1 versions behind
    rollout = torch.from_numpy(batch.rollout_logprobs[mask])
    inputs = LossInputs(
        logprobs=rollout + difference,
        entropy=torch.zeros(4),
        rollout_logprobs=rollout,
        advantages=torch.ones(4),
        denominator_tokens=4,
        sequence_id=torch.tensor([0, 0, 1, 1]),
        denominator_sequences=2,
        staleness=torch.from_numpy(batch.staleness[mask]),
        oldest=3,
    )
    _, metrics = correction(inputs, GRPOSpec())
    clip = clip_metrics(inputs, torch.tensor([1.5, 1.0, 1.0, 1.0]), GRPOSpec())
    found = split({name: float(value) for name, value in (metrics | clip).items()})
    assert found["importance_weight"] == pytest.approx((2 + math.exp(0.5) + math.exp(-0.5)) / 4)
    assert {name: value for name, value in found.items() if "by_staleness" in name} == pytest.approx(
        {
            "tokens_by_staleness/0": 0.25,
            "tokens_by_staleness/1": 0.25,
            "tokens_by_staleness/2": 0.5,
            "importance_weight_by_staleness/0": 1.0,
            "importance_weight_by_staleness/1": math.exp(-0.5),
            "importance_weight_by_staleness/2": (1 + math.exp(0.5)) / 2,
            "rollout_kl_by_staleness/0": 0.0,
            "rollout_kl_by_staleness/1": math.exp(-0.5) - 1 + 0.5,
            "rollout_kl_by_staleness/2": (math.exp(0.5) - 1 - 0.5) / 2,
            "clipped_by_staleness/0": 0.0,
            "clipped_by_staleness/1": 0.0,
            "clipped_by_staleness/2": 0.5,
        }
    )
    for name in found:
        if "by_staleness" in name:
            resolve(name)


def test_samples_of_one_version_are_not_split() -> None:
    staleness = staleness_of(Experience((drawn("p", (5, 0, 2)),)), LEARNER)
    assert staleness is not None
    assert not staleness.differs
