"""Drafts from a prompt and the responses to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.functions.generation import suffixes
from rlhfless.functions.generation.drafts import LONGEST, ORDER, Pace, PromptSuffixes

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
    monkeypatch.setattr(suffixes, "MOST_RESPONSES", 4)
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
    if draft and places <= suffixes.MOST_PLACES:
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
