"""Forecasts of response lengths: parts worked by hand, properties, and a run whose law is known."""

from __future__ import annotations

import math
import pickle
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.scaling.lengths import QUANTILE_LEVELS, LengthPredictor, StepSamples
from rlhfless.scaling.lengths.levels import (
    Evidence,
    Levels,
    inverse_mills,
    mean_weights,
    moments,
    quantiles_beyond,
    runs,
    update,
)

NORMAL = NormalDist()
MEDIAN = QUANTILE_LEVELS.tolist().index(0.5)
MAX_TOKENS = 1024
lengths = st.integers(1, MAX_TOKENS)

Sample = tuple[int, bool]
"""Tokens, and whether the sample was truncated there."""


def step(rows: dict[str, list[Sample]], running: dict[str, list[int]] | None = None) -> StepSamples:
    """The samples of each prompt that have ended, and then those that are running, by their tokens."""
    columns = []
    for prompt, prompt_id in enumerate(rows):
        columns += [(prompt, tokens, True, truncated) for tokens, truncated in rows[prompt_id]]
        columns += [(prompt, tokens, False, False) for tokens in (running or {}).get(prompt_id, [])]
    prompt, tokens, ended, truncated = np.array(columns).T
    return StepSamples(tuple(rows), prompt, tokens, ended.astype(bool), truncated.astype(bool))


def begun(*prompt_ids: str) -> StepSamples:
    """One sample of each prompt, before its first token."""
    return step({prompt_id: [] for prompt_id in prompt_ids}, {prompt_id: [0] for prompt_id in prompt_ids})


def taught(*steps: dict[str, list[Sample]]) -> LengthPredictor:
    predictor = LengthPredictor(MAX_TOKENS)
    for rows in steps:
        predictor.learn(step(rows))
    return predictor


def medians(predictor: LengthPredictor, samples: StepSamples) -> list[float]:
    """[unfinished]: the median of each sample's whole length."""
    return predictor.forecast(samples).total_tokens[:, MEDIAN].tolist()


# -- the values


def test_the_weights_of_the_mean() -> None:
    # Levels 0.2 and 0.6: the first stands for 0 to 0.4, the second for 0.4 to 1.
    assert mean_weights(np.array([0.2, 0.6])) == pytest.approx([0.4, 0.6])
    assert QUANTILE_LEVELS @ mean_weights(QUANTILE_LEVELS) == pytest.approx(0.5, abs=1e-3)  # of a uniform variable


def test_siblings_with_as_many_tokens_are_one_kind() -> None:
    run, first = runs(np.array([0, 0, 0, 1, 1]), np.array([5, 5, 7, 7, 7]))
    assert (run.tolist(), first.tolist()) == ([0, 0, 1, 2, 2], [0, 2, 3])
    forecast = LengthPredictor(64).forecast(step({"p": [(9, False)], "q": []}, {"p": [5, 5, 7], "q": [7]}))
    assert forecast.rows.tolist() == [1, 2, 3, 4]
    assert forecast.kind.tolist() == [0, 0, 1, 2]
    assert forecast.kind_tokens.tolist() == [5, 7, 7]


# -- the level of a prompt


def evidence(log_tokens: list[float], known: list[bool]) -> Evidence:
    """Samples of the one prompt."""
    count = len(known)
    return Evidence(np.zeros(count, np.int64), np.array(log_tokens), np.array(known, bool), np.ones(count))


def level_of(mean: float, variance: float) -> Levels:
    return Levels(np.array([mean]), np.array([variance]))


def test_the_normal_distribution_beyond_a_point() -> None:
    for z in (-7.0, -1.234, 0.0, 2.5, 6.0):
        beyond = 1 - NORMAL.cdf(z)
        assert inverse_mills(np.array([z]))[0] == pytest.approx(NORMAL.pdf(z) / beyond, rel=1e-4)
        quantile = quantiles_beyond(np.array([z]), np.array([0.3]))[0, 0]
        assert quantile == pytest.approx(NORMAL.inv_cdf(1 - 0.7 * beyond), abs=1e-4)
    assert inverse_mills(np.array([25.0]))[0] == pytest.approx(25 + 1 / 25, rel=1e-4)


def test_known_lengths_are_a_normal_update() -> None:
    # Prior N(6, 1), spread 0.5: each sample weighs 4. Two of them at 5: (6 x 1 + 5 x 8) / 9.
    after = update(level_of(6.0, 1.0), 0.5, evidence([5.0, 5.0], [True, True]))
    assert after.mean[0] == pytest.approx(46 / 9)
    assert after.variance[0] == pytest.approx(1 / 9)


def test_a_longer_sample_pulls_by_the_mills_ratio() -> None:
    # At the peak (m - 6) / 1 = k((6 - m) / 0.5) / 0.5.
    mean = float(update(level_of(6.0, 1.0), 0.5, evidence([6.0], [False])).mean[0])
    z = (6.0 - mean) / 0.5
    assert mean - 6.0 == pytest.approx(NORMAL.pdf(z) / (1 - NORMAL.cdf(z)) / 0.5, abs=1e-3)


def test_a_sample_that_has_hardly_begun_says_nothing() -> None:
    after = update(level_of(6.0, 1.0), 0.5, evidence([0.7], [False]))
    assert (after.mean[0], after.variance[0]) == pytest.approx((6.0, 1.0), abs=1e-6)


@given(st.lists(st.floats(0, 9), max_size=6), st.floats(0, 9), st.floats(3, 8), st.floats(0.1, 1.0))
def test_a_longer_sibling_never_lowers_the_level(known: list[float], least: float, mean: float, spread: float) -> None:
    without = update(level_of(mean, 0.6), spread, evidence(known, [True] * len(known)))
    with_it = update(level_of(mean, 0.6), spread, evidence([*known, least], [True] * len(known) + [False]))
    assert with_it.mean[0] >= without.mean[0] - 1e-9


def test_moments_of_a_sample() -> None:
    # Level 5, spread 2. A length of 8 is known. What is longer than 5 is the upper half of the normal distribution: its
    # mean is 5 + 2 k(0), and its mean squared distance from 5 that of the whole.
    mean, squared = moments(np.array([5.0]), 2.0, evidence([8.0, 5.0], [True, False]))
    assert mean == pytest.approx([8.0, 5 + 2 * math.sqrt(2 / math.pi)])
    assert squared == pytest.approx([9.0, 4.0])


# -- forecasts


def test_a_run_without_data_expects_a_quarter_of_max_tokens() -> None:
    assert medians(LengthPredictor(MAX_TOKENS), begun("p")) == pytest.approx([256], rel=0.01)


def test_one_known_length_by_hand() -> None:
    # Before: mean log 256, levels with variance 1 - 0.16, spread 0.4. The prompt's length of 64 is log 4 below: its
    # level moves by 0.84 / (0.84 + 0.16) of that, and is then known up to 0.84 x 0.16.
    level, below = 0.84 * math.log(1 / 4), math.log(1 / 4)
    predictor = taught({"p": [(64, False)]})
    # The run's mean counts the sample once beside its 4 before: the new prompt's median.
    assert medians(predictor, begun("new", "p")) == pytest.approx(
        [256 * math.exp(below / 5), 256 * math.exp(level)], rel=1e-3
    )


def test_a_prompt_is_known_by_its_own_visits_and_a_new_one_by_the_run() -> None:
    predictor = taught(*[{"short": [(50, False)] * 4, "long": [(400, False)] * 4}] * 4)
    short, long, new = medians(predictor, begun("short", "long", "new"))
    assert (short, long) == pytest.approx((50, 400), rel=0.15)
    assert short < new < long
    assert predictor.seen(("long", "new")).tolist() == [True, False]


def test_siblings_that_ended_move_a_new_prompt() -> None:
    predictor = taught({f"p{i}": [(length, False)] * 4 for i, length in enumerate((30, 60, 120, 240, 480))})
    assert medians(predictor, begun("new"))[0] < 200
    assert medians(predictor, step({"new": [(450, False)] * 3}, {"new": [0]})) == pytest.approx([450], rel=0.15)


def test_the_run_forgets_what_was_long_ago() -> None:
    steps = [{f"{n}-{i}": [(100 if n < 20 else 300, False)] * 2 for i in range(8)} for n in range(60)]
    assert medians(taught(*steps), begun("new")) == pytest.approx([300], rel=0.1)


def test_levels_follow_the_mean_of_the_run() -> None:
    # All responses get twice as long; "away" was not seen since.
    first = {"away": [(50, False)] * 8, "p": [(100, False)] * 8, "q": [(200, False)] * 8}
    later = {"p": [(200, False)] * 8, "q": [(400, False)] * 8}
    before, after = taught(*[first] * 6), taught(*[first] * 6, *[later] * 40)
    assert medians(after, begun("away"))[0] > 1.7 * medians(before, begun("away"))[0]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=4),
)
def test_quantiles_are_ordered_and_within_bounds(visits: list[list[Sample]], progress: list[int]) -> None:
    predictor = taught(*({"p": visit, f"other-{index}": visit} for index, visit in enumerate(visits)))
    forecast = predictor.forecast(step({"p": [], "new": []}, {"p": progress, "new": progress}))
    assert len(forecast.rows) == 2 * len(progress)
    assert np.all(np.diff(forecast.table, axis=1) >= 0)
    assert np.all(forecast.table >= 1)
    assert np.all(forecast.table <= np.maximum(MAX_TOKENS - forecast.kind_tokens, 1)[:, None])
    rounding = 1e-12  # of a sum of all quantiles, which may be equal
    assert np.all(forecast.mean_tokens >= forecast.table[forecast.kind, 0] * (1 - rounding))
    assert np.all(forecast.mean_tokens <= forecast.table[forecast.kind, -1] * (1 + rounding))


@settings(max_examples=30)
@given(st.lists(lengths, min_size=1, max_size=20), st.integers(1, 10))
def test_truncated_samples_never_lower_the_forecast_of_a_new_prompt(known: list[int], cut: int) -> None:
    rows = {f"p{i}": [(tokens, False)] for i, tokens in enumerate(known)}
    low = medians(taught(rows), begun("new"))
    high = medians(taught(rows | {f"cut-{i}": [(MAX_TOKENS, True)] for i in range(cut)}), begun("new"))
    assert high[0] >= low[0] * (1 - 1e-6)


def known_run(seed: int) -> tuple[LengthPredictor, np.ndarray, np.ndarray]:
    """Twelve visits to 128 prompts: levels N(6, 0.7), spread 0.35, drift 0.1 a visit. Coverage [Q] and levels."""
    draw = np.random.default_rng(seed)
    level = draw.normal(6, 0.7, 128)
    predictor = LengthPredictor(2048)
    covered = []
    for visit in range(48):
        rows = np.arange(32) + 32 * (visit % 4)
        prompt_ids = tuple(f"p{row}" for row in rows)
        prompt, none, all_ended = np.repeat(np.arange(32), 8), np.zeros(256, bool), np.ones(256, bool)
        real = np.floor(np.exp(level[rows][prompt] + 0.35 * draw.standard_normal(256)).clip(1, 2048))
        if visit >= 8:
            totals = predictor.forecast(StepSamples(prompt_ids, prompt, np.zeros(256), none, none)).total_tokens
            covered.append((real[:, None] <= totals).mean(axis=0))
        predictor.learn(StepSamples(prompt_ids, prompt, real, all_ended, real >= 2048))
        level[rows] += 0.1 * draw.standard_normal(32)
    return predictor, np.mean(covered, axis=0), level


def test_quantiles_cover_what_they_say() -> None:
    _, covered, _ = known_run(seed=0)
    below = QUANTILE_LEVELS < 0.95  # above, max_tokens cuts the distribution off
    assert covered[below] == pytest.approx(QUANTILE_LEVELS[below], abs=0.04)


def test_levels_are_recovered() -> None:
    predictor, _, level = known_run(seed=1)
    forecast = np.log(medians(predictor, begun(*(f"p{row}" for row in range(128)))))
    inside = level < 7  # far enough below max_tokens to be seen
    assert np.abs(forecast - level)[inside].mean() < 0.15


def test_own_tokens_condition_the_forecast() -> None:
    # Of a known prompt, whose level its one more sample hardly moves: given L > t at the median, the new median is
    # where half of what is left lies, the upper quarter.
    predictor, _, _ = known_run(seed=2)
    free = predictor.forecast(begun("p5")).total_tokens[0]
    behind = predictor.forecast(step({"p5": []}, {"p5": [int(free[MEDIAN])]})).total_tokens[0]
    assert behind[MEDIAN] == pytest.approx(free[QUANTILE_LEVELS.tolist().index(0.75)], rel=0.06)


def test_a_pickled_predictor_goes_on_the_same() -> None:
    predictor, _, _ = known_run(seed=3)
    copy = pickle.loads(pickle.dumps(predictor))
    assert np.array_equal(predictor.forecast(begun("p1", "new")).table, copy.forecast(begun("p1", "new")).table)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        LengthPredictor(0)
    with pytest.raises(ValueError, match="'p' comes twice"):
        StepSamples(("p", "p"), np.arange(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
