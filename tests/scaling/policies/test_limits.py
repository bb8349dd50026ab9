"""What is kept in reserve of a deadline is learned from how steps turned out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from rlhfless.scaling.policies.learned import LEAST_CERTAIN, MOST_CERTAIN
from rlhfless.scaling.policies.limits import FIRST_SCATTER, FIRST_STEPS, Limits, StepAim
from rlhfless.scaling.policy import Flags, Ints


@dataclass
class Ended:
    """A step whose samples have ended."""

    truncated: Flags
    tokens: Ints


def step(limits: Limits, took_s: float, *, revisits: bool) -> float:
    """Lets a step that was given 100 s take so long; returns the reserve that it began with."""
    limits.share(1, revisits=revisits)
    reserve = limits.reserve
    limits.begin(StepAim(0.0, 100.0, 100.0), None)
    limits.learn(took_s, Ended(np.zeros(2, np.bool_), np.array([3, 5])))
    return reserve


Z = 2.326
"""Of a normal distribution, below which 99 % lie."""


def reserve(value: float, scatter: float, seen: int) -> float:
    """With so many steps seen, and FIRST_STEPS that count as seen."""
    freedom = max(seen + FIRST_STEPS - 1, 1)
    return value + Z * (1 + (Z**2 + 1) / (4 * freedom)) * scatter


def test_steps_with_prompts_seen_before_are_judged_by_steps_of_their_kind() -> None:
    limits = Limits(0.99)
    first = pytest.approx(reserve(1.0, FIRST_SCATTER, 0), rel=1e-3)
    assert step(limits, 300.0, revisits=False) == first  # it knows nothing, and is no measure
    assert step(limits, 150.0, revisits=False) == first
    once = FIRST_SCATTER * math.sqrt(2 / 3)  # one step, and two that scatter as was assumed
    assert step(limits, 150.0, revisits=False) == pytest.approx(reserve(1.5, once, 1), rel=1e-3)
    # With known prompts it is 1 again; what the two others scattered (not at all, and two as was assumed) is as much.
    seen = FIRST_SCATTER * math.sqrt(2 / 4)
    assert step(limits, 100.0, revisits=True) == pytest.approx(reserve(1.0, seen, 2), rel=1e-3)
    assert step(limits, 80.0, revisits=True) == pytest.approx(reserve(1.0, seen * math.sqrt(4 / 5), 3), rel=1e-3)
    # 1.0 and 0.8: 0.1 from their median each.
    twice = math.sqrt((4 * seen**2 + 2 * (1.4826 * 0.1) ** 2) / 6)
    assert step(limits, 80.0, revisits=True) == pytest.approx(reserve(0.9, twice, 4), rel=1e-3)


def test_caution_goes_from_none_to_that_of_a_deadline() -> None:
    limits = Limits(0.99)
    limits.share(1, revisits=False)
    assert limits.caution(0.0) == (limits.even, 1.0)
    assert limits.caution(1.0) == (pytest.approx(limits.level), pytest.approx(limits.reserve))
    assert limits.caution(0.5) == (
        pytest.approx((limits.even + limits.level) / 2),
        pytest.approx(math.sqrt(limits.reserve)),
    )


def test_a_step_teaches_how_likely_its_longest_response_was() -> None:
    """Forecast: -log of the chance that none is longer than 0, 4 and 8 tokens is 2, 1 and 0. The longest has 5: 0.75,
    a chance of 0.472. It and the four even ones that count as seen before: 0.578 of all lie below that."""
    limits = Limits(0.99)
    limits.share(1, revisits=False)
    limits.begin(StepAim(), (np.array([0.0, 4.0, 8.0]), np.array([2.0, 1.0, 0.0])))
    limits.learn(1.0, Ended(np.zeros(2, np.bool_), np.array([3, 5])))
    chance = math.exp(-0.75)
    assert limits.even == pytest.approx(0.5 / ((4 * chance + 1) / 5) * chance)


def test_forecasts_that_are_wrong_by_far_leave_a_confidence_that_can_be_asked_for() -> None:
    """A thousand samples were sure to be longer than what the longest was: exp(-1000) is 0 as a number."""
    limits = Limits(0.99)
    for _ in range(8):
        limits.share(1, revisits=False)
        limits.begin(StepAim(), (np.array([0.0, 8.0]), np.array([1000.0, 1000.0])))
        limits.learn(1.0, Ended(np.zeros(2, np.bool_), np.array([3, 5])))
    assert limits.even == LEAST_CERTAIN
    assert LEAST_CERTAIN < limits.level <= MOST_CERTAIN
