"""Drafts of suffixes, and how deep to draft where that saves time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.functions.generation import drafts
from rlhfless.functions.generation.drafts import FEWEST, FIRST_RETRY, LONGEST, ORDER, DraftDepth, Pace, PromptSuffixes

PROMPT = [90, 91, 92]


def _with(*responses: Sequence[int]) -> PromptSuffixes:
    index = PromptSuffixes(PROMPT)
    for name, response in enumerate(responses):
        index.add(name, response)
    return index


def test_a_draft_is_what_came_next_in_another_response() -> None:
    index = _with([1, 2, 3, 4, 5, 6], [1, 2, 3])
    assert index.draft(1, 2) == [4, 5]
    assert index.draft(1, 8) == [4, 5, 6]
    assert index.draft(0, 8) == []  # nothing came after its end


def test_the_prompt_s_end_is_where_responses_begin() -> None:
    assert _with([1, 2, 3, 4], []).draft(1, 3) == [1, 2, 3]


def test_a_response_may_repeat_itself_and_its_prompt() -> None:
    assert _with([1, 2, 3, 4, 1, 2, 3]).draft(0, 8) == [4, 1, 2, 3]
    index = PromptSuffixes([7, 8, 9, 10, 11])
    index.add("r", [7, 8, 9])
    assert index.draft("r", 2) == [10, 11]


def test_the_longest_equal_end_decides_and_not_the_newest() -> None:
    index = _with([5, 1, 2, 3, 7], [6, 1, 2, 3, 8], [5, 1, 2, 3])
    assert index.draft(2, 1) == [7]


def test_of_equal_ends_most_decide_and_then_the_newest() -> None:
    index = _with([1, 2, 3, 7, 7], [1, 2, 3, 8, 8], [1, 2, 3, 7, 9], [1, 2, 3])
    assert index.draft(3, 1) == [7]  # two of three
    assert index.draft(3, 2) == [7, 9]  # the newer one of the two


def test_old_responses_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MOST_RESPONSES", 4)
    index = _with([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16])
    assert (index.length(0), index.tokens) == (4, 3 + 16)
    index.add("new", [1, 2, 3])
    assert (index.length(0), index.length(3), index.tokens) == (0, 4, 3 + 8 + 3)
    assert index.draft("new", 2) == []
    index.add("newer", [13, 14, 15])
    assert index.draft("newer", 2) == [16]


TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 6), st.lists(st.integers(1, 5), max_size=10))
@settings(max_examples=200, deadline=None)
def test_a_draft_follows_an_equal_end_that_is_as_long_as_any(
    responses: list[list[int]], depth: int, parts: list[int]
) -> None:
    """Against all ends of all sequences, tried one after the other. How a response came, in which parts, changes
    nothing."""
    own = responses[-1]
    index = _with(*responses[:-1])
    for part in parts:
        index.add(len(responses) - 1, own[index.length(len(responses) - 1) :][:part])
    index.add(len(responses) - 1, own[index.length(len(responses) - 1) :])
    draft = index.draft(len(responses) - 1, depth)

    begun = [PROMPT + response for response in responses]
    ends = [
        (_equal(begun[-1], other[:end]), other[end:])
        for other in begun
        for end in range(ORDER, len(other))
        if _equal(begun[-1], other[:end]) >= ORDER
    ]
    assert bool(draft) == bool(ends)
    assert len(draft) <= depth
    places = len(ends)
    if draft and places <= drafts.MOST_PLACES:
        longest = max(length for length, _ in ends)
        assert draft in [rest[: len(draft)] for length, rest in ends if length == longest]


def _equal(own: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    while length < min(len(own), len(other), LONGEST) and own[-1 - length] == other[-1 - length]:
        length += 1
    return length


def test_the_pace_follows_what_is_taken() -> None:
    pace = Pace(8)
    assert pace.next() == 8
    pace.saw(8, 3)
    assert pace.next() == 3
    pace.saw(3, 3)
    assert pace.next() == 6
    pace.saw(6, 6)
    assert pace.next() == 8


def test_a_response_whose_drafts_all_miss_gets_fewer_and_fewer() -> None:
    """One draft after 2, then after 4, then after 8 passes without: of 100 passes a handful."""
    pace = Pace(4)
    lengths = []
    for _ in range(100):
        lengths.append(pace.next())
        if lengths[-1]:
            pace.saw(lengths[-1], 0)
    assert [place for place, length in enumerate(lengths) if length] == [0, 3, 8, 17, 34, 67]
    assert lengths[0] == 4
    assert {*lengths[1:]} == {0, 1}


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
