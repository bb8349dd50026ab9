"""The time of iterations, split among runs."""

from __future__ import annotations

import random

import pytest

from rlhfless.functions.generation.vllm.iteration_shares import IterationShares, TokenWeights


def test_an_iteration_is_split_by_tokens_until_their_times_are_known() -> None:
    shares = IterationShares()
    shares.begin(1, 10.0)
    shares.end(1, {"a": (3, 0), "b": (0, 1)}, 14.0)
    assert shares.seconds == {"a": 3.0, "b": 1.0}


def test_iterations_that_overlap_are_counted_once_and_idle_time_is_nobodys() -> None:
    shares = IterationShares()
    shares.begin(1, 0.0)
    shares.begin(2, 1.0)  # scheduled while the first one runs
    shares.end(1, {"a": (0, 1)}, 3.0)
    shares.end(2, {"b": (0, 1)}, 5.0)
    shares.begin(3, 100.0)
    shares.end(3, {"a": (0, 1)}, 101.0)
    shares.begin(4, 101.0)
    shares.end(4, {}, 103.0)
    assert shares.seconds == {"a": 4.0, "b": 2.0}


def test_tokens_are_weighed_by_the_times_that_they_take() -> None:
    weights, random_ = TokenWeights(), random.Random(0)
    for _ in range(500):
        prompt, generated = random_.choice(((0, 16), (200, 8), (512, 0)))
        weights.add(prompt, generated, 0.001 * prompt + 0.02 * generated)
    assert weights.weights() == pytest.approx((0.001, 0.02), rel=1e-6)


def test_the_parts_add_up_to_the_time_whatever_the_weights() -> None:
    shares, random_, now_s, worked_s = IterationShares(), random.Random(1), 0.0, 0.0
    for number in range(1000):
        now_s += random_.choice((0.0, 5.0))
        shares.begin(number, now_s)
        lasted_s = random_.random()
        now_s, worked_s = now_s + lasted_s, worked_s + lasted_s
        tokens = {run: (random_.choice((0, 0, 300)), random_.randint(1, 20)) for run in "abc"[: random_.randint(1, 3)]}
        shares.end(number, tokens, now_s)
    assert sum(shares.seconds.values()) == pytest.approx(worked_s)
    assert min(shares.seconds.values()) > 0
