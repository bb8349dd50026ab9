"""Generation with prompts computed apart, against one pool: figures worked by hand, and a slow walk over iterations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.prediction.prefill import AlikeEngines, StepShape, apart_s, compare, drawn_s, one_pool_s
from rlhfless.scaling.latency.fitted import LinearEngine

FLAT = AlikeEngines(LinearEngine(1.0, 0.0, 0.0, 0.01, 0.0), 2, 1000, kv_token_s=0.0, move_s=0.0)
"""An iteration takes 1 s whatever is in it, and a prompt token 0.01 s."""

STEEP = AlikeEngines(LinearEngine(0.0, 0.1, 0.0, 0.01, 0.0), 2, 1000, kv_token_s=0.0, move_s=0.0)
"""Each sequence of an iteration takes 0.1 s."""


def step_of(prompts: int, samples: int, prompt_tokens: int, response_tokens: int) -> StepShape:
    """With equal lengths."""
    return StepShape.of(prompts, samples, prompt_tokens, response_tokens, 0.0, 10**6)


def test_with_equal_lengths_one_pool_is_faster() -> None:
    """16 prompts of 800 tokens take 128 s, and 100 iterations 100 s. In one pool of two engines 64 + 100. Apart the
    pieces come after 16, 32, ..., 128 s, and the last ends 100 s later."""
    step = step_of(16, 4, 800, 100)
    assert one_pool_s(step, FLAT) == pytest.approx(164)
    assert apart_s(step, FLAT, 1) == pytest.approx(228)
    assert not compare(step, FLAT).pays


def test_where_sequences_cost_the_same_in_any_batch() -> None:
    """16 prompts x 2 responses of 10 tokens are 320 tokens of 0.1 s: 16 s for each of two engines, or 32 s for one. In
    one pool 8 prompts of 0.12 s come first. Apart the first piece is of 2."""
    step = step_of(16, 2, 12, 10)
    assert one_pool_s(step, STEEP) == pytest.approx(8 * 0.12 + 16)
    assert apart_s(step, STEEP, 1) == pytest.approx(2 * 0.12 + 32)


def test_it_pays_where_the_longest_responses_need_not_wait_for_all_prompts() -> None:
    """16 prompts of 800 tokens, in pieces of two, which come after 16, 32, ..., 128 s; the first piece has responses of
    200 tokens and the others of 50. In one pool of two engines 64 + 200; apart the first ends after 16 + 200, and the
    last after 128 + 50."""
    step = replace(step_of(16, 4, 800, 50), response_tokens=(200, *[50] * 7))
    found = compare(step, FLAT)
    assert (found.together_s, found.apart_s) == (pytest.approx(264), pytest.approx(216))
    assert (found.prefill, found.pays) == (1, True)


def test_the_best_number_of_engines_prefills() -> None:
    """Four engines, 16 prompts of 10 s, one token of response: with three for the prompts 53.3 s and an iteration."""
    found = compare(step_of(16, 1, 1000, 1), replace(FLAT, count=4))
    assert found.together_s == pytest.approx(41)
    assert found.prefill == 3
    assert found.apart_s == pytest.approx(160 / 3 + 1)


def test_an_engine_draws_no_more_at_once_than_it_admits() -> None:
    """8 prompts of 1 sample and 50 tokens, on an engine that admits 4. Pieces come at 10, 20, ..., 80 s: the first four
    end at 60, 70, 80 and 90, when each of the others begins: the last ends at 140."""
    few = replace(FLAT, max_sequences=4)
    step = step_of(8, 1, 1000, 50)
    assert apart_s(step, few, 1) == pytest.approx(140)
    assert one_pool_s(step, few) == pytest.approx(90)


def test_lengths_are_the_middles_of_equal_parts() -> None:
    """The median of a lognormal's upper eighth is its quantile 15/16, which is 1.534 deviations above the median."""
    step = StepShape.of(8, 1, 100.0, 100.0, 1.0, 400)
    assert step.response_tokens[0] == 400
    assert step.response_tokens[1] == round(100 * math.exp(0.8871))
    assert list(step.response_tokens) == sorted(step.response_tokens, reverse=True)
    assert StepShape.of(8, 1, 100.0, 100.0, 0.0, 400).response_tokens == (100,) * 8


def test_an_engine_with_few_prompts_has_the_longest_responses() -> None:
    """Two prompts on each of two engines: the first has 200 tokens. Apart, one engine draws all four, of which the
    first comes after 4 s."""
    step = replace(step_of(4, 1, 800, 50), response_tokens=(200, *[50] * 7))
    assert one_pool_s(step, FLAT) == pytest.approx(2 * 8 + 200)
    assert apart_s(step, FLAT, 1) == pytest.approx(4 + 200)


def test_without_a_connector_or_a_second_engine_there_is_nothing_to_compare() -> None:
    step = step_of(16, 4, 800, 100)
    for engines in (replace(FLAT, kv_token_s=math.inf), replace(FLAT, count=1)):
        found = compare(step, engines)
        assert math.isinf(found.apart_s)
        assert (found.prefill, found.pays) == (0, False)


def test_moves_take_time() -> None:
    """8 prompts in 8 pieces of 100 tokens at 0.002 s: 0.2 s each, and 0.5 s for calls. Pieces come 1 s apart and an
    iteration takes 1 s, so what comes 0.7 s after the engine began is drawn from the next iteration on."""
    step = step_of(8, 1, 100, 10)
    moved = replace(FLAT, kv_token_s=0.002, move_s=0.5)
    assert apart_s(step, FLAT, 1) == pytest.approx(18)
    assert apart_s(step, moved, 1) == pytest.approx(18 + 0.7 + 7 * 0.2)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_as_a_walk_over_iterations(parts: list[tuple[int, int, int]], most: int) -> None:
    """With iterations of a constant time, in which an arrival waits for the end of an iteration."""
    engines = replace(FLAT, max_sequences=most)
    arrivals = [(float(at_s), sequences, tokens) for at_s, sequences, tokens in sorted(parts)]
    waiting = [(at_s, tokens) for at_s, sequences, tokens in arrivals for _ in range(sequences)]
    running: list[int] = []
    now_s = 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s and len(running) < most:
            running.append(waiting.pop(0)[1])
        now_s += 1.0
        running = [left - 1 for left in running if left > 1]
    assert drawn_s(arrivals, 10, engines) == pytest.approx(now_s)
