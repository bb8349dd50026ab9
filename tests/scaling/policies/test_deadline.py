"""What is kept in reserve of a deadline is learned from how steps turned out."""

from __future__ import annotations

import math

import pytest

from rlhfless.scaling.policies.cost_aware.estimates import (
    FIRST_SCATTER,
    FIRST_STEPS,
    DeadlineMargin,
    StepAim,
)


def step(margins: DeadlineMargin, took_s: float, *, revisits: bool) -> float:
    """Lets a step that was given 100 s take so long; returns the reserve that it began with."""
    margin = margins.of_step(1, revisits=revisits)
    aim = StepAim(margin, began_s=0.0, limit_s=100.0, planned_s=100.0)
    margins.learn(took_s, aim)
    return margin.reserve


Z = 2.326
"""Of a normal distribution, below which 99 % lie."""


def reserve(value: float, scatter: float, seen: int) -> float:
    """With so many steps seen, and FIRST_STEPS that count as seen."""
    freedom = max(seen + FIRST_STEPS - 1, 1)
    return value + Z * (1 + (Z**2 + 1) / (4 * freedom)) * scatter


def test_steps_with_prompts_seen_before_are_judged_by_steps_of_their_kind() -> None:
    margins = DeadlineMargin(0.99)
    first = pytest.approx(reserve(1.0, FIRST_SCATTER, 0), rel=1e-3)
    assert step(margins, 300.0, revisits=False) == first  # it knows nothing, and is no measure
    assert step(margins, 150.0, revisits=False) == first
    once = FIRST_SCATTER * math.sqrt(2 / 3)  # one step, and two that scatter as was assumed
    assert step(margins, 150.0, revisits=False) == pytest.approx(reserve(1.5, once, 1), rel=1e-3)
    # With known prompts it is 1 again; what the two others scattered (not at all, and two as was assumed) is as much.
    seen = FIRST_SCATTER * math.sqrt(2 / 4)
    assert step(margins, 100.0, revisits=True) == pytest.approx(reserve(1.0, seen, 2), rel=1e-3)
    assert step(margins, 80.0, revisits=True) == pytest.approx(reserve(1.0, seen * math.sqrt(4 / 5), 3), rel=1e-3)
    # 1.0 and 0.8: 0.1 from their median each.
    twice = math.sqrt((4 * seen**2 + 2 * (1.4826 * 0.1) ** 2) / 6)
    assert step(margins, 80.0, revisits=True) == pytest.approx(reserve(0.9, twice, 4), rel=1e-3)
