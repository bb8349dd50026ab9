"""Metrics of held-out prompts, computed by hand and compared with a simulation of the samples."""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.orchestrator import step
from rlhfless.orchestrator.experience import LOGPROBS
from rlhfless.orchestrator.step import evaluate_held_out
from rlhfless.orchestrator.step_metrics import figures_of, mean_reward, pass_at
from rlhfless.records import Experience, FinishReason, Group, Prompt, Rollout, Score
from rlhfless.spec import EvaluationSpec, ScoringSpec


def group(name: str, values: list[float | None]) -> Group:
    """Return samples with these rewards; None is a failed reward."""
    rollouts = [
        Rollout(name, i, 0, np.arange(2), np.zeros(2, np.float32), "", FinishReason.STOP, (), "a", 0.0, 1.0)
        for i in range(len(values))
    ]
    scores = [Score(v or 0.0, {} if v is None else {"right": v}) for v in values]
    return Group.of(Prompt(name, (1,), ""), rollouts).adding(score=scores)


def test_the_mean_reward_is_weighted_and_leaves_failed_samples_out() -> None:
    failed = Group.of(Prompt("c", (1,), ""), group("c", [0]).samples[0].rollouts).adding(
        score=[Score(0.0, {}, {"right": "no answer"})]
    )
    sampled = Experience((group("a", [1, 0]), group("b", [0.5]), failed))
    assert mean_reward(sampled, ScoringSpec()) == {"reward_mean": pytest.approx(0.5)}
    assert mean_reward(Experience((failed,)), ScoringSpec()) == {}


def test_the_mean_reward_counts_failed_parts_as_0_where_training_does() -> None:
    """As in the steps' `reward_mean`. Both skip a sample without finite logprobs."""
    half, odd = (
        Group.of(Prompt("c", (1,), ""), group("c", [0]).samples[0].rollouts).adding(score=[score])
        for score in (
            Score(0.5, {"format": 0.5, "right": 0.0}, {"right": "no answer"}),
            Score(1.0, {"right": 1.0}, {LOGPROBS: "nan"}),
        )
    )
    sampled = Experience((group("a", [1, 0]), half, odd))
    assert mean_reward(sampled, ScoringSpec(on_failure="zero")) == {"reward_mean": pytest.approx(1.5 / 3)}
    assert mean_reward(sampled, ScoringSpec(on_failure="drop")) == {"reward_mean": pytest.approx(0.5)}


def test_by_hand() -> None:
    sampled = Experience((group("a", [1, 0, 0, 0]), group("b", [1, 1, 0.5, None])))
    greedy = Experience((group("a", [0]), group("b", [1])))
    figures = figures_of(sampled, greedy, EvaluationSpec(samples_per_prompt=4, pass_at=(1, 2, 4)))
    assert figures == pytest.approx(
        {
            "right": (1 + 1 + 1 + 0.5) / 7,  # the failed sample has no reward
            "right_pass@1": (1 / 4 + 2 / 3) / 2,
            "right_pass@2": (1 - 3 / 6 + 1) / 2,
            "right_pass@4": 1.0,  # only of the prompt with four rewards
            "right_greedy": 0.5,
        }
    )
    lenient = EvaluationSpec(samples_per_prompt=4, pass_at=(1,), pass_from=0.5)
    assert figures_of(sampled, greedy, lenient)["right_pass@1"] == pytest.approx((1 / 4 + 3 / 3) / 2)


@given(st.integers(1, 7), st.data())
def test_pass_at_is_the_share_of_subsets_in_which_one_passed(samples: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert pass_at(k, [(samples, passed)]) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_is_unbiased() -> None:
    """For samples that pass with probability 0.3, the mean of pass@2 is 1 - 0.7^2; 1 - (1 - c / n)^2 is less."""
    counts = [(5, int(passed)) for passed in np.random.default_rng(0).binomial(5, 0.3, 40_000)]
    assert pass_at(2, counts) == pytest.approx(1 - 0.7**2, abs=4e-3)
    naive = float(np.mean([1 - (1 - c / n) ** 2 for n, c in counts]))
    assert naive < 1 - 0.7**2 - 0.03


async def test_the_samples_of_an_evaluation_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, greedy = Experience((group("a", [1, 0]),)), Experience((group("a", [1]),))
    told: list[Any] = []

    async def drawn(*_: Any, **__: Any) -> tuple[Experience, Experience]:
        return sampled, greedy

    async def average() -> None: ...

    monkeypatch.setattr(step, "generate_scored", drawn)
    run: Any = SimpleNamespace(
        clock=SimpleNamespace(interrupt=lambda: None),
        held_out_request=lambda step, greedy: (step, greedy),
        generate=lambda request: request,
        average=average,
        published=SimpleNamespace(version=SimpleNamespace(step=6)),
        evaluated_samples=lambda *given: told.append(given),
        spec=SimpleNamespace(evaluation=EvaluationSpec(), scoring=ScoringSpec(), scores_samples=True),
    )
    figures = await evaluate_held_out(run, 7)
    assert figures["right"] == 0.5
    assert told == [(7, sampled, greedy)]
