"""The closed form of a group's time, against hand-worked cases and a loop over phases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.views import Roofline, Straight, device, drained_s
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.policies.cost_aware.group_times import (
    MOST_PIECES,
    CapacityError,
    GroupTimes,
    NetworkTimes,
    fit_iteration_times,
    responses,
)


def times_of(engine, tokens, prompt, prompt_tokens, **changes) -> GroupTimes:
    step = responses(tokens, prompt, prompt_tokens)
    return GroupTimes(device(engine, **changes).actor, step, step.list_order)


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


SHARED = PrefixTree(np.array([8]), np.array([NONE]), np.array([0, 0]))
"""Two prompts that share their first 8 tokens."""


def test_a_shared_prefix_is_prefilled_once_in_each_group():
    # Of two prompts of 10 tokens, at 0.1 s a token: 8 + 2 + 2 together, 10 each apart.
    engine = Straight(per_prompt_token_s=0.1)
    step = responses([4, 4, 4], [0, 0, 1], [10, 10], SHARED)
    times = GroupTimes(device(engine).actor, step, step.list_order)
    assert times.one_s(0, 3) == pytest.approx(4 * 2.5 + 1.2)
    assert times.one_s(0, 2) == pytest.approx(4 * 2 + 1)
    assert times.one_s(2, 3) == pytest.approx(4 * 1.5 + 1)
    assert times.one_s(1, 3) == pytest.approx(4 * 2 + 1.2), "the sibling that is cut off has its prompt again"


def test_a_shared_prefix_is_held_once():
    # Each ends with 4 + 6 tokens, of which 5 are shared: 5 + 5 a sample. One more prompt's room is kept free.
    tree = PrefixTree(np.array([5]), np.array([NONE]), np.zeros(6, np.int64))
    step = responses([4] * 6, range(6), [6] * 6, tree)
    at_once = GroupTimes(device(Straight(), kv_capacity_tokens=36 + 5).actor, step, step.list_order)
    assert at_once.one_s(0, 6) == pytest.approx(4 * 4), "all six"
    assert times_of(Straight(), [4] * 6, range(6), [6] * 6, kv_capacity_tokens=36 + 5).one_s(0, 6) > 4 * 4


def prefilled_tokens(tree, prompt_tokens, prompts) -> int:
    """The tokens of an actor's prompts, each shared prefix once."""
    prefixes = {prefix for prompt in prompts for prefix in tree.lineage(int(tree.leaf[prompt]))}
    own = sum(prompt_tokens[prompt] - int(tree.shared_tokens[prompt]) for prompt in prompts)
    return own + int(tree.own_tokens[sorted(prefixes)].sum())


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=12), st.booleans())
def test_no_group_is_charged_less_than_its_prefixes_take(samples, side_by_side):
    """Prompts 0 to 7 behind a tree of two levels. Charges are exact where users are side by side, else not too low."""
    tree = PrefixTree(np.array([4, 10, 9, 3]), np.array([NONE, 0, 0, NONE]), np.array([1, 1, 2, 0, 3, 3, NONE, NONE]))
    prompt_tokens, engine = [12, 13, 11, 8, 5, 6, 7, 2], Straight(1e-9, 1e-9, per_prompt_token_s=1.0)
    tokens, prompt = map(np.array, zip(*samples, strict=True))
    order = np.argsort(prompt, kind="stable") if side_by_side else np.arange(len(samples))
    step = responses(tokens, prompt, prompt_tokens, tree)
    times = GroupTimes(device(engine).actor, step, order)
    for begin in range(len(samples)):
        for end in range(begin + 1, len(samples) + 1):
            exact = prefilled_tokens(tree, prompt_tokens, set(prompt[order[begin:end]].tolist()))
            if side_by_side:
                assert times.one_s(begin, end) == pytest.approx(exact, abs=1e-6)
            else:
                assert times.one_s(begin, end) >= exact - 1e-9


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
def test_siblings_apart_in_the_list_are_never_foreseen_too_soon(samples, knee):
    """Each run of siblings is charged for their prompt."""
    tokens, prompt = map(list, zip(*samples, strict=True))
    engine = Roofline(per_sequence_s=5.9e-3 / knee, context_s=1e-5, per_prompt_token_s=1e-3)
    exact_s = drained_s(engine, tokens, prompt, [9, 1, 5, 30])
    assert times_of(engine, tokens, prompt, [9, 1, 5, 30]).one_s(0, len(tokens)) >= exact_s * (1 - 1.1e-3)


@given(groups, st.integers(1, 6), st.integers(100, 400), st.floats(0, 2))
def test_the_longest_group_is_what_a_scan_finds(samples, max_sequences, memory, limit_s):
    tokens, prompt = map(list, zip(*samples, strict=True))
    engine = Roofline(per_sequence_s=1e-3, memory_s=3e-3, per_prompt_token_s=1e-3)
    times = times_of(engine, tokens, prompt, [9, 1, 5, 30], max_sequences=max_sequences, kv_capacity_tokens=memory)
    for end in range(1, len(tokens) + 1):
        seconds = times.time_s(np.arange(end), np.full(end, end))
        fits = np.flatnonzero(seconds <= limit_s)
        begin, taken_s = times.longest_group(end, limit_s)
        assert begin == (fits[0] if fits.size else end)
        assert taken_s == (pytest.approx(seconds[begin]) if fits.size else 0.0)


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=300))
def test_few_straight_pieces_stand_for_any_iteration_time(table):
    curve, levelled = fit_iteration_times(table), np.maximum.accumulate(table)
    assert len(curve.slopes_s) <= MOST_PIECES
    assert curve.knots[-1] == len(table)
    assert min(curve.slopes_s) >= 0
    at_knots = curve.of(np.array(curve.knots, float))
    assert at_knots == pytest.approx(levelled[np.array(curve.knots) - 1], rel=1e-6)


def test_a_roofline_needs_two_pieces():
    curve = fit_iteration_times([Roofline().iteration_s(size) for size in range(1, 513)])
    assert len(curve.slopes_s) <= 4
    sizes = np.arange(1.0, 513)
    assert curve.of(sizes) == pytest.approx([Roofline().iteration_s(int(s)) for s in sizes], rel=1.1e-3)


@pytest.mark.parametrize("tokens", [[], [0.0], [math.inf]])
def test_bad_lengths_are_refused(tokens):
    with pytest.raises(ValueError, match="give one predicted length per sample, 1 token or more"):
        responses(tokens, [0] * len(tokens), [1])


# -- waits for an environment


def test_a_session_alone_waits_and_generates_in_turn():
    """10 tokens of 1 s each, and 3 s of waiting per token: 40 s. The work of a batch is not stretched by waits that it
    does not have."""
    assert NetworkTimes(1.0, 3.0).of(np.array([10.0]), np.array([10.0])) == pytest.approx([40])
    assert NetworkTimes(1.0, 0.0).of(np.array([25.0]), np.array([10.0])) == pytest.approx([25])


def test_others_add_to_an_iteration_only_while_they_do_not_wait():
    """f = 4, r = 12, z = 9: with t = 18 the sessions are in the batch for half of the time, 9 + 4 + 12 / 2 = 19 > 18.
    t = (25 + sqrt(625 - 432)) / 2 = 19.45 solves it."""
    (t,) = NetworkTimes(1.0, 9 / 4).of(np.array([16.0]), np.array([4.0]))
    assert t == pytest.approx((25 + math.sqrt(193)) / 2)
    assert t == pytest.approx(9 + 4 + 12 * (t - 9) / t)


@given(
    st.floats(1, 1e4),
    st.floats(0, 1e4),
    st.floats(0, 100),
    st.floats(1, 1e4),
)
def test_waits_are_between_hidden_and_added_and_a_limit_is_the_inverse(longest, rest, token_s, slack):
    network, alone = NetworkTimes(0.01, token_s), 0.01 * longest
    (t,) = network.of(np.array([alone + rest]), np.array([longest]))
    waits = token_s * longest
    assert max(alone + rest, alone + waits) * (1 - 1e-9) <= t <= (alone + rest + waits) * (1 + 1e-9)
    limit = (alone + waits) + slack
    (again,) = network.of(np.array([network.work_s(limit, longest)]), np.array([longest]))
    assert again == pytest.approx(limit, rel=1e-6)
    assert network.work_s((alone + waits) * 0.99, longest) < alone or waits == 0


def test_the_longest_group_under_a_limit_counts_waits():
    step = responses([4] * 8, range(8), [1] * 8)
    engine = Straight()  # a(B) = 1 + B / 2
    times = GroupTimes(device(engine).actor, step, step.list_order, wait_token_s=2.0)
    begin, seconds = times.longest_group(8, 16.0)
    assert 0 < begin < 8
    assert seconds <= 16.0 < times.one_s(begin - 1, 8)
    assert times.one_s(begin, 8) == pytest.approx(seconds)
    assert times.time_s(np.array([begin]), np.array([8])) == pytest.approx([seconds])
    assert times.longest_group(8, 11.9) == (8, 0.0), "4 iterations of 1.5 s and 8 s of waiting"
