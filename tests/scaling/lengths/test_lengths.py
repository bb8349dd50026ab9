"""Forecasts of response lengths: parts worked by hand, properties, and a run whose law is known."""

from __future__ import annotations

import math
import pickle
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.scaling.lengths import QUANTILE_LEVELS, Forecast, LengthPredictor
from rlhfless.scaling.lengths.forecast import mean_weights
from rlhfless.scaling.lengths.hazard import HazardTable
from rlhfless.scaling.lengths.levels import Levels, mills, update, without_each
from rlhfless.scaling.lengths.samples import Samples

MEDIAN = QUANTILE_LEVELS.tolist().index(0.5)
MAX_TOKENS = 1024
lengths = st.integers(1, MAX_TOKENS)


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def table(pseudo_count: float = 1e-9) -> HazardTable:
    """Cells [0, 1), [1, 2) ... [9, 10), with next to nothing known before the data."""
    return HazardTable(np.linspace(0, 10, 11), mean=5.0, sd=3.0, pseudo_count=pseudo_count)


def tell(predictor: LengthPredictor, step: int, rows: dict[str, list[tuple[int, bool]]]) -> None:
    """A whole step: each prompt's samples as (tokens, truncated)."""
    predictor.step_began(step, tuple(rows), max(map(len, rows.values())))
    for prompt_id, samples in rows.items():
        for index, (tokens, truncated) in enumerate(samples):
            predictor.finished(step, prompt_id, index, tokens, truncated=truncated)
    predictor.step_ended(step)


def before_step(predictor: LengthPredictor, prompt_id: str) -> Forecast:
    predictor.step_began(999, (prompt_id,), 1)
    return predictor.forecast(999)


# -- the hazard table


def hazard_at(counts: HazardTable, x: np.ndarray) -> np.ndarray:
    """H at x: -log P(X > x)."""
    return np.interp(x, *counts.shape(0.0, 1.0))


def test_kaplan_meier_by_hand() -> None:
    # Ends in cells 1 and 3; one is cut off in cell 1. Cell 1: 4 reach it, 1 ends: survival 3/4.
    # Cell 3: the cut-off one is gone, 2 reach it, 1 ends: survival 3/4 x 1/2 = 3/8.
    counts = table()
    counts.add(array(1.5, 3.5, 7.5), array(1.5))
    survival = np.exp(-hazard_at(counts, array(1, 2, 3, 4, 7)))
    assert survival == pytest.approx([1, 3 / 4, 3 / 4, 3 / 8, 3 / 8], rel=1e-6)


def test_a_quantile_is_where_the_hazard_reaches_it() -> None:
    counts = table()
    counts.add(array(1.5, 3.5, 7.5, 7.5), array())
    # Within a cell the hazard is a line: half of that of cell 1, and of that of cell 3, is reached in their middles.
    first, second = math.log(4 / 3), math.log(2)
    middles = counts.at_hazard(array(first / 2, (first + second) / 2))
    assert middles == pytest.approx([1.5, 3.5], abs=1e-6)


def test_forgetting_halves_what_was_counted() -> None:
    counts = table()
    counts.add(array(1.5, 1.5), array())
    counts.add(array(7.5), array(), keep=0.5)  # one of the old pair is left, and one new
    assert np.exp(-hazard_at(counts, array(5.0))) == pytest.approx(0.5, rel=1e-6)


def test_without_data_the_table_is_the_normal_it_began_with() -> None:
    counts = HazardTable(np.linspace(-8, 8, 1601), mean=0.5, sd=1.5, pseudo_count=4)
    x = array(-2, 0.5, 3)
    expected = [1 - NormalDist(0.5, 1.5).cdf(value) for value in x]
    assert np.exp(-hazard_at(counts, x)) == pytest.approx(expected, rel=1e-9)
    assert counts.moments() == pytest.approx((0.5, 1.5), rel=2e-3)


@given(
    ended=st.lists(st.floats(0, 10), max_size=20),
    cut_off=st.lists(st.floats(0, 10), max_size=20),
    more=st.lists(st.floats(0, 10), min_size=1, max_size=5),
)
def test_what_is_cut_off_lowers_no_quantile(ended: list[float], cut_off: list[float], more: list[float]) -> None:
    one, two = table(4.0), table(4.0)
    one.add(np.array(ended), np.array(cut_off))
    two.add(np.array(ended), np.array(cut_off + more))
    hazards = -np.log1p(-QUANTILE_LEVELS)
    assert np.all(two.at_hazard(hazards) >= one.at_hazard(hazards) - 1e-9)


@given(ended=st.lists(st.floats(0, 10), max_size=20), hazard=st.floats(0, 40))
def test_quantile_and_hazard_are_inverse(ended: list[float], hazard: float) -> None:
    counts = table(4.0)
    counts.add(np.array(ended), array())
    assert hazard_at(counts, counts.at_hazard(array(hazard))) == pytest.approx([hazard], rel=1e-6, abs=1e-9)


# -- the level of a prompt


def samples(log_tokens: list[float], finished: list[float]) -> Samples:
    one_each = np.ones(len(log_tokens))
    return Samples(np.zeros(len(log_tokens), np.intp), array(*log_tokens), array(*finished) > 0, one_each)


def test_the_mills_ratio() -> None:
    normal = NormalDist()
    for z in (-7.0, -1.234, 0.0, 2.5, 6.0):
        assert mills(array(z))[0] == pytest.approx(normal.pdf(z) / (1 - normal.cdf(z)), rel=1e-4)
    assert mills(array(25.0))[0] == pytest.approx(25 + 1 / 25, rel=1e-4)


def test_finished_siblings_are_a_normal_update() -> None:
    # Prior N(6, 1), spread 0.5: each sample weighs 4. Two of them at 5: (6 x 1 + 5 x 8) / 9.
    after = update(Levels(array(6.0), array(1.0)), array(0.5), samples([5.0, 5.0], [1, 1]))
    assert after.mean[0] == pytest.approx(46 / 9, rel=1e-9)
    assert after.variance[0] == pytest.approx(1 / 9, rel=1e-9)


def test_a_cut_off_sample_pulls_by_the_mills_ratio() -> None:
    # At the peak (m - 6) / 1 = k((c - m) / 0.5) / 0.5; m is where both sides are equal.
    after = update(Levels(array(6.0), array(1.0)), array(0.5), samples([6.0], [0]))
    m = after.mean[0]
    normal, z = NormalDist(), (6.0 - m) / 0.5
    assert m - 6.0 == pytest.approx(normal.pdf(z) / (1 - normal.cdf(z)) / 0.5, abs=1e-3)


def test_a_sample_that_has_hardly_begun_says_nothing() -> None:
    after = update(Levels(array(6.0), array(1.0)), array(0.5), samples([0.7], [0]))
    assert after.mean[0] == pytest.approx(6.0, abs=1e-6)
    assert after.variance[0] == pytest.approx(1.0, abs=1e-6)


def test_a_sample_is_no_evidence_for_itself() -> None:
    prior, spread = Levels(array(6.0), array(1.0)), array(0.5)
    both, other = samples([5.0, 6.2], [1, 0]), samples([5.0], [1])
    left = without_each(update(prior, spread, both), spread, both)
    alone = update(prior, spread, other)
    assert left.mean[1] == pytest.approx(alone.mean[0], abs=0.05)
    assert left.variance[1] == pytest.approx(alone.variance[0], rel=0.05)


@given(
    st.lists(st.floats(0, 9), min_size=1, max_size=6),
    st.floats(0, 9),
    st.floats(3, 8),
    st.floats(0.1, 1.0),
)
def test_a_cut_off_sibling_never_lowers_the_level(
    known: list[float], cut_off: float, mean: float, spread: float
) -> None:
    prior = Levels(array(mean), array(0.6))
    without = update(prior, array(spread), samples(known, [1] * len(known)))
    with_it = update(prior, array(spread), samples([*known, cut_off], [1] * len(known) + [0]))
    assert with_it.mean[0] >= without.mean[0] - 1e-3 * spread  # Newton's rest


# -- forecasts


def test_the_weights_of_the_mean() -> None:
    weights = mean_weights(QUANTILE_LEVELS)
    assert weights.sum() == pytest.approx(1.0)
    assert QUANTILE_LEVELS @ weights == pytest.approx(0.5, abs=1e-3)  # the mean of a uniform variable


def test_a_run_without_data_expects_a_quarter_of_max_tokens() -> None:
    forecast = before_step(LengthPredictor(MAX_TOKENS), "p")
    assert forecast.remaining_tokens.shape == (1, len(QUANTILE_LEVELS))
    assert forecast.remaining_tokens[0, MEDIAN] == pytest.approx(256, rel=0.03)


def test_a_prompt_is_known_by_its_own_visits_and_a_new_one_by_the_run() -> None:
    predictor = LengthPredictor(MAX_TOKENS)
    for step in range(4):
        rows = {"short": [(50, False)] * 4, "long": [(400, False)] * 4}
        tell(predictor, step, rows)
    predictor.step_began(999, ("short", "long", "new"), 1)
    short, long, new = predictor.forecast(999).remaining_tokens[:, MEDIAN]
    assert short == pytest.approx(50, rel=0.15)
    assert long == pytest.approx(400, rel=0.15)
    assert short < new < long


def test_finished_siblings_move_a_new_prompt() -> None:
    predictor = LengthPredictor(MAX_TOKENS)
    tell(predictor, 1, {f"p{i}": [(length, False)] * 4 for i, length in enumerate((30, 60, 120, 240, 480))})
    predictor.step_began(2, ("new",), 4)
    before = predictor.forecast(2).remaining_tokens[0, MEDIAN]
    for index in range(3):
        predictor.finished(2, "new", index, 450, truncated=False)
    after = predictor.forecast(2)
    assert len(after) == 1
    assert after.sample.tolist() == [3]
    assert after.remaining_tokens[0, MEDIAN] == pytest.approx(450, rel=0.15)
    assert before < 200


def test_the_run_forgets_what_was_long_ago() -> None:
    predictor = LengthPredictor(MAX_TOKENS)
    for step in range(60):
        tell(predictor, step, {f"{step}-{i}": [(100 if step < 20 else 300, False)] * 2 for i in range(8)})
    assert before_step(predictor, "new").remaining_tokens[0, MEDIAN] == pytest.approx(300, rel=0.1)


def test_truncated_responses_count_as_at_least() -> None:
    cut, ended = LengthPredictor(MAX_TOKENS), LengthPredictor(MAX_TOKENS)
    tell(cut, 1, {f"p{i}": [(500, True)] for i in range(20)})  # stopped from outside
    tell(ended, 1, {f"p{i}": [(500, False)] for i in range(20)})
    assert before_step(ended, "new").remaining_tokens[0, MEDIAN] == pytest.approx(500, rel=0.05)
    assert before_step(cut, "new").remaining_tokens[0, MEDIAN] > 600


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=4),
)
def test_quantiles_are_ordered_and_within_bounds(visits: list[list[tuple[int, bool]]], progress: list[int]) -> None:
    predictor = LengthPredictor(MAX_TOKENS)
    for step, visit in enumerate(visits):
        tell(predictor, step, {"p": visit, f"other-{step}": visit})
    predictor.step_began(999, ("p", "new"), 4)
    for index, tokens in enumerate(progress):
        predictor.progress(999, "p", index, tokens)
        predictor.progress(999, "new", index, tokens)
    forecast = predictor.forecast(999)
    assert len(forecast) == 8
    assert np.all(np.diff(forecast.remaining_tokens, axis=1) >= 0)
    assert np.all(forecast.remaining_tokens >= 1)
    assert np.all(forecast.total_tokens <= np.maximum(MAX_TOKENS, forecast.tokens[:, None] + 1))
    rounding = 1e-12  # of a sum of all quantiles, which may be equal
    assert np.all(forecast.mean_tokens >= forecast.remaining_tokens[:, 0] * (1 - rounding))
    assert np.all(forecast.mean_tokens <= forecast.remaining_tokens[:, -1] * (1 + rounding))


@settings(max_examples=30)
@given(st.lists(lengths, min_size=1, max_size=20), st.integers(1, 10))
def test_truncated_samples_never_lower_the_forecast_of_a_new_prompt(known: list[int], cut: int) -> None:
    one, two = LengthPredictor(MAX_TOKENS), LengthPredictor(MAX_TOKENS)
    rows = {f"p{i}": [(tokens, False)] for i, tokens in enumerate(known)}
    tell(one, 1, rows)
    tell(two, 1, rows | {f"cut-{i}": [(MAX_TOKENS, True)] for i in range(cut)})
    low, high = before_step(one, "new").remaining_tokens, before_step(two, "new").remaining_tokens
    # The scale of a sample is learned from both, so only the median is free of it.
    assert high[0, MEDIAN] >= low[0, MEDIAN] * (1 - 1e-6)


def known_run(seed: int) -> tuple[LengthPredictor, np.ndarray, np.ndarray]:
    """Twelve visits to 128 prompts: levels N(6, 0.7), spread 0.35, drift 0.1 a visit. Coverage [Q] and mean loss."""
    draw = np.random.default_rng(seed)
    level = draw.normal(6, 0.7, 128)
    predictor = LengthPredictor(2048)
    covered = []
    for step in range(48):
        rows = np.arange(32) + 32 * (step % 4)
        names = [f"p{row}" for row in rows]
        real = np.exp(level[rows][:, None] + 0.35 * draw.standard_normal((32, 8))).clip(1, 2048)
        predictor.step_began(step, names, 8)
        if step >= 8:
            totals = predictor.forecast(step).total_tokens
            covered.append((real.reshape(-1, 1) <= totals).mean(axis=0))
        for row, name in enumerate(names):
            for index, tokens in enumerate(real[row]):
                predictor.finished(step, name, index, int(tokens), truncated=bool(tokens >= 2048))
        predictor.step_ended(step)
        level[rows] += 0.1 * draw.standard_normal(32)
    return predictor, np.mean(covered, axis=0), level


def test_quantiles_cover_what_they_say() -> None:
    _, covered, _ = known_run(seed=0)
    below = QUANTILE_LEVELS < 0.95  # above, max_tokens cuts the distribution off
    assert covered[below] == pytest.approx(QUANTILE_LEVELS[below], abs=0.04)


def test_levels_are_recovered() -> None:
    predictor, _, level = known_run(seed=1)
    predictor.step_began(999, [f"p{row}" for row in range(128)], 1)
    forecast = np.log(predictor.forecast(999).total_tokens[:, MEDIAN])
    inside = level < 7  # far enough below max_tokens to be seen
    assert np.abs(forecast - level)[inside].mean() < 0.15


def test_own_tokens_condition_the_forecast() -> None:
    # A normal law that is known: given L > t, the median is where half of what is left above t lies.
    predictor, _, _ = known_run(seed=2)
    predictor.step_began(999, ["new"], 1)
    free = predictor.forecast(999).total_tokens[0]
    predictor.progress(999, "new", 0, int(free[MEDIAN]))
    behind = predictor.forecast(999).total_tokens[0]
    upper_quarter = free[QUANTILE_LEVELS.tolist().index(0.75)]
    assert behind[MEDIAN] == pytest.approx(upper_quarter, rel=0.02)


def test_a_pickled_predictor_goes_on_the_same() -> None:
    predictor, _, _ = known_run(seed=3)
    copy = pickle.loads(pickle.dumps(predictor))
    one, two = before_step(predictor, "p1"), before_step(copy, "p1")
    assert np.array_equal(one.remaining_tokens, two.remaining_tokens)


def test_misuse_is_refused() -> None:
    predictor = LengthPredictor(16)
    with pytest.raises(ValueError, match="at least 1 token"):
        LengthPredictor(0)
    with pytest.raises(ValueError, match="'p' comes twice"):
        predictor.step_began(1, ("p", "p"), 2)
    predictor.step_began(1, ("p",), 2)
    with pytest.raises(ValueError, match="step 1 has begun already"):
        predictor.step_began(1, ("p",), 2)
    with pytest.raises(KeyError):
        predictor.finished(1, "q", 0, 3, truncated=False)


def test_a_step_that_is_given_up_teaches_nothing() -> None:
    predictor, fresh = LengthPredictor(64), LengthPredictor(64)
    predictor.step_began(1, ("p",), 2)
    predictor.finished(1, "p", 0, 60, truncated=False)
    predictor.drop(1)
    predictor.drop(7)  # never begun
    for each in (predictor, fresh):
        each.step_began(1, ("p",), 2)
    assert (predictor.forecast(1).remaining_tokens == fresh.forecast(1).remaining_tokens).all()
