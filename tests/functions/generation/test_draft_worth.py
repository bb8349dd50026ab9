"""Drafts are tried, measured, and left where they lose."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfless.functions.generation.draft_worth import FEWEST, FIRST_RETRY, DraftWorth


def run(
    worth: DraftWorth, responses: int, passes: int, cost: float, taken: float, seed: int = 0
) -> tuple[float, float]:
    """Seconds, and the seconds of an engine without drafts, for the same tokens. A pass without drafts takes 1 s with
    noise of a tenth, and now and then ten times as long; one with drafts `cost` times as long, for 1 + `taken` tokens a
    response."""
    random = np.random.default_rng(seed)
    spent = without = 0.0
    for _ in range(passes):
        drafted = worth.next(responses)
        noise = random.lognormal(0, 0.1) * (10 if random.random() < 0.03 else 1)
        seconds = (cost if drafted else 1.0) * noise
        tokens = responses * (1 + taken * drafted)
        worth.saw(responses, int(1000 * tokens), 1000 * seconds, drafted=drafted)
        spent += seconds
        without += noise * tokens / responses
    return spent, without


@pytest.mark.parametrize("seed", range(5))
def test_where_drafts_lose_a_fifth_they_are_left_and_cost_less_than_one_per_cent(seed: int) -> None:
    """A step of the demo is some 1,500 passes, so ten steps have 15,000."""
    spent, without = run(DraftWorth(), 16, 15_000, cost=1.25, taken=0.0, seed=seed)
    assert 1 <= spent / without < 1.01


@pytest.mark.parametrize("seed", range(5))
def test_where_they_win_nearly_all_of_the_gain_is_kept(seed: int) -> None:
    """Two tokens a pass of 1.2 s: 0.6 of the time."""
    spent, without = run(DraftWorth(), 4, 5_000, cost=1.2, taken=1.0, seed=seed)
    assert 0.6 <= spent / without < 0.62


def test_each_number_of_responses_is_learned_by_itself() -> None:
    worth = DraftWorth()
    for _ in range(20):
        run(worth, 64, 10, cost=2.0, taken=0.5)
        run(worth, 2, 10, cost=1.1, taken=1.0)
    assert [worth.next(responses) for responses in (64, 100, 2, 3)] == [False, False, True, True]


def test_it_begins_with_both_ways_in_turn() -> None:
    worth = DraftWorth()
    ways = []
    for _ in range(2 * FEWEST):
        ways.append(worth.next(8))
        worth.saw(8, 8, 1.0, drafted=ways[-1])
    assert ways == [True, False] * FEWEST


def test_a_change_is_noticed() -> None:
    """Drafts that lost begin to win, for example because the policy has become surer."""
    worth = DraftWorth()
    run(worth, 8, 300, cost=1.5, taken=0.0)
    spent, without = run(worth, 8, 40 * FIRST_RETRY * 4, cost=1.1, taken=1.0)
    assert spent / without < 0.85
