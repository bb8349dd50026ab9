"""The closed form of a group's time, against hand-worked cases and a loop over phases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import Roofline, Straight, device, drained_s

from rlhfless.scaling.plan import CapacityError, kernel, responses
from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.curve import MOST_PIECES, fit_curve
from rlhfless.scaling.plan.kernel import Taken
from rlhfless.scaling.plan.responses import lists


def times_of(engine, tokens, prompt, prompt_tokens, **changes) -> GroupTimes:
    step = responses(tokens, prompt, prompt_tokens)
    return GroupTimes(device(engine, **changes), step, lists(step)[0])


def test_a_group_drains_as_its_sequences_end():
    # a(B) = 1 + B/2. Two iterations of 3 sequences, two of 2: 2 x 2.5 + 2 x 2 = 9 s. Reading, at 0.01 s a token:
    # 2 x 10 + 1 for the short one, 4 x 10 + 6 for each of the others: 1.13 s. The prompts, at 0.1 s a token: 2 s.
    engine = Straight(context_s=0.01, per_prompt_token_s=0.1)
    times = times_of(engine, [4, 2, 4], [1, 0, 1], [10, 10])
    assert times.one_s(0, 3) == pytest.approx(9 + 1.13 + 2)


def test_siblings_that_are_cut_apart_prefill_their_prompt_twice():
    engine = Straight(per_prompt_token_s=0.1)
    times = times_of(engine, [4, 4, 4], [0, 0, 0], [10])
    together, apart = times.one_s(0, 3), [times.one_s(0, 1), times.one_s(1, 3)]
    assert together == pytest.approx(4 * 2.5 + 1)
    assert apart == pytest.approx([4 * 1.5 + 1, 4 * 2 + 1])


def test_more_than_the_engine_runs_at_once_comes_in_waves():
    # Six of 4 tokens, two at a time: three waves of 4 x a(2) = 8 s.
    assert times_of(Straight(), [4] * 6, range(6), [0] * 6, max_sequences=2).one_s(0, 6) == pytest.approx(24)


def test_memory_limits_a_wave_by_the_final_lengths():
    # Each ends with 4 + 6 tokens; a fourth prompt's room is kept free: (36 - 6) / 10 = 3 at once, so two waves.
    times = times_of(Straight(), [4] * 6, range(6), [6] * 6, kv_capacity_tokens=36)
    assert times.one_s(0, 6) == pytest.approx(2 * 4 * 2.5)


def test_a_response_that_no_device_can_hold_is_refused():
    with pytest.raises(CapacityError, match="gpu: kv_capacity_tokens is 20"):
        times_of(Straight(), [30], [0], [0], kv_capacity_tokens=20)


groups = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12)


@given(groups, st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 12))
def test_the_closed_form_is_the_sum_of_the_phases(samples, prompt_tokens, knee):
    tokens, prompt = map(list, zip(*((50 * p + 1, p) for _, p in samples), strict=True))
    engine = Roofline(per_sequence_s=5.9e-3 / knee, context_s=1e-5, per_prompt_token_s=1e-3)
    assert times_of(engine, tokens, prompt, prompt_tokens).one_s(0, len(tokens)) == pytest.approx(
        drained_s(engine, tokens, prompt, prompt_tokens), rel=1.1e-3
    )


@given(groups, st.integers(1, 12))
def test_groups_given_already_are_exact_where_siblings_differ(samples, knee):
    tokens, prompt = map(list, zip(*samples, strict=True))
    engine = Roofline(per_sequence_s=5.9e-3 / knee, context_s=1e-5, per_prompt_token_s=1e-3)
    step, prompt_tokens = responses(tokens, prompt, [9, 1, 5, 30]), [9, 1, 5, 30]
    order, actor = np.lexsort((prompt, tokens)), np.zeros(len(tokens), np.int64)
    exact = GroupTimes(device(engine), step, order, actor).time_s(np.array([0]), np.array([len(tokens)]))
    assert exact[0] == pytest.approx(drained_s(engine, tokens, prompt, prompt_tokens), rel=1.1e-3)
    for order in lists(step):  # what is planned with is never shorter
        assert GroupTimes(device(engine), step, order).one_s(0, len(tokens)) >= exact[0] * (1 - 1e-9)


@given(groups, st.integers(1, 6), st.integers(100, 400), st.floats(0, 2))
def test_the_longest_group_is_what_a_scan_finds(samples, max_sequences, memory, limit_s):
    tokens, prompt = map(list, zip(*samples, strict=True))
    engine = Roofline(per_sequence_s=1e-3, memory_s=3e-3, per_prompt_token_s=1e-3)
    times = times_of(engine, tokens, prompt, [9, 1, 5, 30], max_sequences=max_sequences, kv_capacity_tokens=memory)
    for end in range(1, len(tokens) + 1):
        seconds = times.time_s(np.arange(end), np.full(end, end))
        fits = np.flatnonzero(seconds <= limit_s)
        # One actor takes the longest group.
        room = np.empty(1, np.int64), np.empty(1)
        taken = Taken(*kernel.take(times.table, np.arange(len(tokens) + 1), limit_s, 0, 1, False, end, *room))
        begin, found_s = taken.end, taken.sum_s
        assert begin == (fits[0] if fits.size else end)
        assert found_s == pytest.approx(seconds[begin] if fits.size else 0.0)


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=300))
def test_few_straight_pieces_stand_for_any_iteration_time(table):
    curve, levelled = fit_curve(table), np.maximum.accumulate(table)
    assert len(curve.slopes_s) <= MOST_PIECES
    assert curve.knots[-1] == len(table)
    assert min(curve.slopes_s) >= 0
    at_knots = curve.iteration_s(np.array(curve.knots, float))
    assert at_knots == pytest.approx(levelled[np.array(curve.knots) - 1], rel=1e-6)


def test_a_roofline_needs_two_pieces():
    curve = fit_curve([Roofline().iteration_s(size) for size in range(1, 513)])
    assert len(curve.slopes_s) <= 4
    sizes = np.arange(1.0, 513)
    assert curve.iteration_s(sizes) == pytest.approx([Roofline().iteration_s(int(s)) for s in sizes], rel=1.1e-3)
    assert curve.merging_pays


def test_an_engine_that_slows_down_with_the_batch_is_known():
    assert not fit_curve([1.0, 1.5, 4.0, 9.0]).merging_pays


@pytest.mark.parametrize(
    ("tokens", "prompt", "prompt_tokens", "says"),
    [
        ([], [], [1], "at least one"),
        ([0.0], [0], [1], "has a value of 0"),
        ([math.inf], [0], [1], "finitely many"),
        ([1.0], [0, 0], [1], "one prompt per sample"),
        ([1.0], [1], [1], "outside prompt_tokens"),
        ([1.0], [0], [-1], "negative"),
    ],
)
def test_bad_responses_are_refused(tokens, prompt, prompt_tokens, says):
    with pytest.raises(ValueError, match=says):
        responses(tokens, prompt, prompt_tokens)
