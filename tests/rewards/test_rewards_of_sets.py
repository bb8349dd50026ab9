"""Rewards that are for the prompts of some sets alone."""

from __future__ import annotations

import asyncio

from rlhfless.records import FinishReason
from rlhfless.rewards import Rewards, RewardSample
from rlhfless.rewards.protocol import ARGUMENTS
from rlhfless.spec import ExactMatchSpec, LengthPenaltySpec, PythonRewardSpec, ScoringSpec


def sample(source: str, response: str, **columns: str) -> RewardSample:
    return RewardSample("p", response, 8, FinishReason.STOP, columns, "p", 0, source)


def test_each_sample_gets_the_rewards_of_its_set() -> None:
    """Rows of `code` have no answer, for which `exact_match` would fail."""
    specs = [
        ExactMatchSpec(type="exact_match", sets=("math", "quiz")),
        LengthPenaltySpec(type="length_penalty", free_tokens=0, max_tokens=16, weight=2, sets=("code",)),
        LengthPenaltySpec(type="length_penalty", free_tokens=0, max_tokens=32, name="long"),
    ]
    samples = [sample("math", "4", answer="4"), sample("code", "x = 1"), sample("quiz", "no", answer="yes")]
    scores = asyncio.run(Rewards(specs, ScoringSpec()).score(samples))
    assert [dict(score.parts) for score in scores] == [
        {"exact_match": 1.0, "long": -0.25},
        {"length_penalty": -0.5, "long": -0.25},
        {"exact_match": 0.0, "long": -0.25},
    ]
    assert [score.total for score in scores] == [0.75, -1.25, -0.25]
    assert not any(score.failures for score in scores)


def test_the_set_is_no_argument_of_a_reward() -> None:
    """A column of that name stays reachable."""
    assert "source" not in ARGUMENTS
    assert PythonRewardSpec(type="python", target="a:b", sets=("x",)).scores("x")
