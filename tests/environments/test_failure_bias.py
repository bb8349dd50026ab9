"""Alarms for failures that are not random: by hand, against scipy, and on drawn steps (test 5 of the design)."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.environments.failure_bias import FALSE_ALARMS, Counts, biased, exact_p, failure_p_values
from rlhfless.orchestrator.experience import log_failures
from rlhfless.records import Episode, EpisodeCall, EpisodeStatus, Experience, Score

RETRIES = 2


def test_fishers_lady_tasting_tea() -> None:
    """Three of four cups right: 16 + 1 of 70 at that end, and as many at the other."""
    assert exact_p([Counts(3, 4, 1, 4)]) == pytest.approx(34 / 70)
    assert exact_p([Counts(4, 4, 0, 4)]) == pytest.approx(2 / 70)


def test_strata_add_up() -> None:
    """Two strata of 1 failure in 2: the kind has both in one of four equally likely cases, none in another."""
    assert exact_p([Counts(1, 1, 0, 1), Counts(1, 1, 0, 1)]) == pytest.approx(1 / 2)
    assert exact_p([Counts(1, 1, 0, 1), Counts(0, 1, 1, 1)]) == pytest.approx(1)
    assert exact_p([Counts(0, 3, 0, 5)]) == 1, "nothing failed"


CELLS = st.tuples(*[st.integers(0, 12)] * 4)


@given(st.lists(CELLS, min_size=1, max_size=2))
def test_it_is_what_counting_all_tables_gives(cells: list[tuple[int, int, int, int]]) -> None:
    """With fractions, over all tables with the same margins."""
    strata = [
        Counts(failed, failed + well, others, others + others_well) for failed, well, others, others_well in cells
    ]
    chances: Counter[int] = Counter({0: Fraction(1)})
    for each in strata:
        failures = each.failed + each.others_failed
        tables = math.comb(each.total + each.others_total, failures)
        more: Counter[int] = Counter()
        for (before, chance), mine in itertools.product(chances.items(), range(min(failures, each.total) + 1)):
            ways = math.comb(each.total, mine) * math.comb(each.others_total, failures - mine)
            more[before + mine] += chance * Fraction(ways, tables)
        chances = more
    observed = chances[sum(each.failed for each in strata)]
    assert exact_p(strata) == pytest.approx(float(sum(chance for chance in chances.values() if chance <= observed)))


def drawn_step(seed: int, fails, prompts: int = 16, siblings: int = 8) -> list[list[tuple[Episode, float | None]]]:
    """Draw a step's episodes: prompts are easy or hard, good episodes make more calls of two tools. `fails(random,
    good, turn, tool)` says whether a call fails; the episode then starts again, and has no reward in the end if it has
    failed too often."""
    draw = random.Random(seed)
    groups = []
    for _ in range(prompts):
        ease = draw.random()
        group = []
        for _ in range(siblings):
            good = draw.random() < ease
            tools = [draw.choice("ab") for _ in range(draw.randint(2, 6 + 4 * good))]
            first: tuple[tuple[int, str], ...] = ()
            for _ in range(1 + RETRIES):
                failed = next((n for n, tool in enumerate(tools) if fails(draw, good, n, tool)), None)
                if failed is None:
                    break
                first = first or tuple(enumerate(tools[: failed + 1]))
            made = tools if failed is None else tools[:failed]
            calls = tuple(
                EpisodeCall(n + 1, n, tool, {}, "result", "", None, False, 0.0) for n, tool in enumerate(made)
            )
            status = EpisodeStatus.DONE if failed is None else EpisodeStatus.FAILED
            reward = float(good) if failed is None else None
            group.append((Episode((), (), calls, status, reward, "Game", "", until_failure=first), reward))
        groups.append(group)
    return groups


def test_random_failures_raise_no_alarm() -> None:
    """30 % of all calls fail, and 5 %: of 100 steps, 0.1 should have an alarm; two have a chance of 0.5 %."""
    alarms = [
        biased(failure_p_values(drawn_step(seed, lambda draw, *_, share=share: draw.random() < share)))
        for share in (0.3, 0.05)
        for seed in range(50)
    ]
    assert FALSE_ALARMS == 0.001
    assert sum(map(bool, alarms)) < 2


@pytest.mark.parametrize(
    ("kinds", "fails"),
    [
        ({"outcome", "siblings"}, lambda draw, good, turn, tool: good and draw.random() < 0.3),
        ({"tool"}, lambda draw, good, turn, tool: tool == "b" and draw.random() < 0.2),
        ({"turns"}, lambda draw, good, turn, tool: turn > 3 and draw.random() < 0.2),
    ],
)
def test_failures_that_are_not_random_raise_one(kinds: set[str], fails) -> None:
    """Steps of 128 episodes; an alarm in at least 9 of 10."""
    raised = [biased(failure_p_values(drawn_step(seed, fails))) for seed in range(10)]
    assert sum(bool(kinds & set(found)) for found in raised) >= 9


def test_a_step_with_such_failures_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def experience(fails) -> Experience:
        """Groups that have what the alarm reads of them: episodes and scores."""
        groups = [
            SimpleNamespace(
                samples=[
                    SimpleNamespace(episode=episode, score=score, scored=score)
                    for episode, reward in group
                    for score in [Score(reward or 0.0, {}, {} if reward is not None else {"environment": "it is gone"})]
                ]
            )
            for group in drawn_step(3, fails)
        ]
        return Experience(cast(Any, tuple(groups)))

    log_failures(experience(lambda draw, *_: draw.random() < 0.3), 7)
    assert "depend on" not in caplog.text
    log_failures(experience(lambda draw, good, *_: good and draw.random() < 0.3), 7)
    assert "step 7: failures of the environment depend on the reward of the episode (p = 2.6e-10)" in caplog.text


def test_nothing_is_said_without_failures_or_calls() -> None:
    assert failure_p_values(drawn_step(0, lambda *_: False)) == {}
    assert failure_p_values(drawn_step(0, lambda *_: True)) == {}, "all calls failed"
    assert failure_p_values([]) == {}
    assert biased({}) == []
    assert biased({"tool": 1e-4, "turns": 1e-9, "outcome": math.nan, "siblings": 0.1}) == ["turns", "tool"]
