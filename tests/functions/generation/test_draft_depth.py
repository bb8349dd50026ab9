"""Drafts are tried, measured, and as deep as saves time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile

import numpy as np
import pytest

from rlhfless.functions.generation.drafts import FEWEST, FIRST_RETRY, DraftDepth

MOST = 4


def run(
    depth: DraftDepth,
    responses: int,
    passes: int,
    verify: float,
    draft: float,
    acceptance: Sequence[float],
    seed: int = 0,
) -> tuple[float, float]:
    """Seconds, and the seconds of an engine without drafts, for the same tokens. A pass without drafts takes 1 s with
    noise of a tenth, and now and then ten times as long; one with drafts `verify` longer, and `draft` longer for each
    draft of a response. `acceptance`: by place, the chance of a draft to be accepted where those before it are."""
    random = np.random.default_rng(seed)
    spent = without = 0.0
    rests = 0
    for _ in range(passes):
        seen = not rests
        limit, rests = depth.next(responses) if seen else (0, rests - 1)
        noise = random.lognormal(0, 0.1) * (10 if random.random() < 0.03 else 1)
        taken = [sum(takewhile(bool, random.random(limit) < acceptance[:limit])) for _ in range(responses)]
        seconds = (1 + (verify if limit else 0) + draft * limit) * noise
        if seen:
            depth.saw(responses, seconds, limit, sum(taken))
        spent += seconds
        without += noise * (1 + sum(taken) / responses)
    return spent, without


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_lose_a_fifth_they_are_left_and_cost_less_than_one_per_cent(seed: int) -> None:
    """A step of the demo is some 1,500 passes, so ten steps have 15,000."""
    spent, without = run(DraftDepth(MOST), 16, 15_000, verify=0.25, draft=0, acceptance=[0] * MOST, seed=seed)
    assert 1 <= spent / without < 1.01


@pytest.mark.parametrize("seed", range(5))
def test_where_they_win_nearly_all_of_the_gain_is_kept(seed: int) -> None:
    """Two tokens a pass of 1.2 s: 0.6 of the time."""
    spent, without = run(DraftDepth(1), 4, 5_000, verify=0.2, draft=0, acceptance=[1], seed=seed)
    assert 0.6 <= spent / without < 0.62


@pytest.mark.parametrize("seed", range(5))
def test_the_depth_is_the_one_with_the_fewest_seconds_a_token(seed: int) -> None:
    """Of 0 to 4 drafts at .1 s each after .1 s for having any, that are accepted at .8, .8, .5 and .1 of the places:
    1, 1.2 / 1.8, 1.3 / 2.44, 1.4 / 2.76 and 1.5 / 2.792 s a token. Depth 3 has the fewest, .507; 2 is within .03."""
    depth, chances = DraftDepth(MOST), [0.8, 0.8, 0.5, 0.1]
    yields = [1, *(1 + total for total in accumulate(accumulate(chances, lambda one, other: one * other)))]
    costs = [1, *(1.1 + 0.1 * drafts for drafts in range(1, MOST + 1))]
    assert min(range(MOST + 1), key=lambda drafts: costs[drafts] / yields[drafts]) == 3
    spent, without = run(depth, 16, 5_000, verify=0.1, draft=0.1, acceptance=chances, seed=seed)
    assert spent / without < 0.53


def test_each_number_of_responses_is_learned_by_itself() -> None:
    """Verifying costs more where more responses run: none, a few, or all drafts."""
    depth = DraftDepth(MOST)
    for _ in range(20):
        run(depth, 64, 10, verify=0.1, draft=0.8, acceptance=[0.6] * MOST)
        run(depth, 16, 10, verify=0.1, draft=0.25, acceptance=[0.8, 0.8, 0, 0])
        run(depth, 2, 10, verify=0.1, draft=0.02, acceptance=[0.9] * MOST)
    assert [depth.next(responses)[0] for responses in (64, 100, 16, 2, 3)] == [0, 0, 2, 4, 4]


def test_it_measures_every_depth_before_it_chooses() -> None:
    depth = DraftDepth(MOST)
    limits = []
    for _ in range((MOST + 1) * FEWEST):
        limit, rests = depth.next(8)
        assert rests == 0
        limits.append(limit)
        depth.saw(8, 1.0, limit, 2 * limit)
    assert limits == sorted([*range(MOST + 1)] * FEWEST)


def test_a_change_is_noticed() -> None:
    """Drafts that lost begin to win, for example because the policy has become surer."""
    depth = DraftDepth(MOST)
    run(depth, 8, 300, verify=0.5, draft=0, acceptance=[0] * MOST)
    spent, without = run(depth, 8, 160 * FIRST_RETRY, verify=0.1, draft=0, acceptance=[1, 0, 0, 0])
    assert spent / without < 0.85


def test_a_retry_that_is_not_measured_ends() -> None:
    """Where requests come and go in each pass, none is measured; a depth that lost is not kept for that."""
    depth = DraftDepth(MOST)
    run(depth, 8, 300, verify=0.5, draft=0, acceptance=[0] * MOST)
    answers = [depth.next(8) for _ in range(20 * FIRST_RETRY)]
    drafting, passes = sum(limit > 0 for limit, _ in answers), sum(1 + rests for _, rests in answers)
    assert 0 < drafting < 0.03 * passes
    assert passes > 5 * len(answers), "most passes are not looked at"
