"""The fit: sums by hand, coefficients recovered from a replayed engine, and measured runs where they are at hand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.builders import traced
from fakes.repository import ROOT
from rlhfless.records import FunctionName, Invocation, Work
from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.latency.fitted import BentEngine, LatencyFit, LinearEngine, _non_negative
from rlhfless.scaling.latency.timeline import KNOTS, WORK, Requests, admitted_s, iterations, spans

MEASURED = os.environ.get("RLHFLESS_MEASURED_RUNS")
"""Folder of measured vLLM runs, see benchmarks/latency.py."""

TRUE = LinearEngine(5e-3, 5e-5, 1e-7, 3e-5, 2e-9)
GUESS = LinearEngine(8e-3, 2e-5, 2e-7, 1e-5, 4e-9)


def requests(rows: list[tuple[float, float, float, float]], cached: float = 0.0) -> Requests:
    """Each row: prompt tokens, response tokens, start, end."""
    prompt, response, start, end = np.array(rows, dtype=float).T
    return Requests(prompt, np.full(len(rows), cached), response, start, end)


def coefficients(engine: BentEngine) -> np.ndarray:
    """[WORK]: the factor of each sum of a span."""
    ends = engine.context_s, engine.prefill_token_s, engine.prefill_context_s
    return np.array([engine.fixed_s, *engine.sequence_s, *ends])


def bent(line: LinearEngine) -> BentEngine:
    """The same without a bend."""
    slopes = (line.sequence_s,) * len(KNOTS)
    return BentEngine(line.fixed_s, slopes, line.context_s, line.prefill_token_s, line.prefill_context_s)


def everyone(told: Requests) -> np.ndarray:
    return np.ones(len(told.started_s), dtype=bool)


def generating(actor: str, start_s: float, end_s: float) -> Invocation:
    return Invocation(FunctionName.GENERATION, actor, actor, Work.GENERATE, 1, start_s, end_s)


def engine(model: EngineModel, seed: int, sequences: int = 24, longest_prompt: int = 3000) -> Requests:
    """A step on one engine: all prompts are prefilled, and then all sequences decode until their end."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(20, longest_prompt, sequences).astype(float)
    length = np.sort(draw.integers(20, 800, sequences)).astype(float)
    now = 100.0 + sum(model.prefill_s(int(tokens)) for tokens in prompt)
    end, drawn, context = np.empty(sequences), 0.0, float(prompt.sum())
    for index in range(sequences):
        steps = length[index] - drawn
        now += decode_s(model, sequences - index, context, steps)
        context += steps * (sequences - index) - prompt[index] - length[index]
        drawn, end[index] = length[index], now
    return Requests(prompt, np.zeros(sequences), length, np.full(sequences, 100.0), end)


def test_the_sums_of_a_span_by_hand() -> None:
    # A draws 16 tokens in 0..10, B 8 tokens in 5..9: it begins at iteration 8.
    work, seconds = spans(requests([(100, 16, 0, 10), (50, 8, 5, 9)]))
    assert dict(zip(WORK, work[0], strict=True)) == pytest.approx(
        {
            "iterations": 16,
            "sequences_beyond_0": 24,
            "sequences_beyond_32": 0,
            "sequences_beyond_128": 0,
            "context": (100 * 16 + 16 * 16 / 2) + (50 * 8 + 8 * 8 / 2),
            "prefill": 150,
            "prefill_context": 100 * 50 + 50 * 25,
        }
    )
    # While B ran, A drew its tokens 9 to 16, and read 108 to 116.
    assert work[1] == pytest.approx([8, 16, 0, 0, (100 * 8 + (16**2 - 8**2) / 2) + 432, 50, 50 * 25])
    assert seconds.tolist() == [10, 4]


def test_iterations_are_numbered_by_what_ended() -> None:
    # All begin together; an engine that gets faster as it empties. The fourth begins when the first two have ended.
    begin, end = iterations(requests([(9, 4, 0, 8), (9, 4, 0, 8), (9, 10, 0, 14), (9, 2, 10, 12)]))
    assert begin.tolist() == [0, 0, 0, pytest.approx(6)]  # 4 at 8 s, 10 at 14 s: 6 at 10 s
    assert end.tolist() == [4, 4, 10, pytest.approx(8)]
    # Nothing ran between the two, and nothing is counted.
    begin, _ = iterations(requests([(9, 4, 0, 8), (9, 4, 20, 28)]))
    assert begin.tolist() == [0, 4]


def test_cached_tokens_are_not_prefilled_but_read() -> None:
    work, _ = spans(requests([(100, 10, 0, 10)], cached=60))
    assert work[0, -2:] == pytest.approx([40, 40 * (60 + 20)])


def test_a_batch_is_counted_piece_by_piece() -> None:
    # 200 draw two tokens, and 40 of them four more: two iterations of 200, and four of 40.
    work, _ = spans(requests([(1, 2, 0, 10)] * 160 + [(1, 6, 0, 20)] * 40))
    assert work[0, 1:4].tolist() == [2 * 32, 2 * 96, 2 * 72]
    assert work[-1, 1:4].tolist() == [2 * 32 + 4 * 32, 2 * 96 + 4 * 8, 2 * 72]


def test_requests_above_the_limit_have_waited() -> None:
    # Two at a time: the third runs once the first is done, the fourth once the second is.
    asked, finished = np.array([0.0, 0, 1, 2]), np.array([5.0, 9, 12, 14])
    assert admitted_s(asked, finished, max_sequences=2).tolist() == [0, 0, 5, 9]
    assert admitted_s(asked, finished, max_sequences=4).tolist() == [0, 0, 1, 2]


def test_least_squares_without_negative_coefficients() -> None:
    products, targets = np.diag([2.0, 4.0, 1.0]), np.array([4.0, -8.0, 3.0])
    assert _non_negative(products, targets).tolist() == [2.0, 0.0, 3.0]


def test_without_data_it_is_the_prior() -> None:
    model = LatencyFit(TRUE).model()
    assert coefficients(model) == pytest.approx(coefficients(bent(TRUE)), rel=1e-6)
    assert LinearEngine.of(TRUE).coefficients == pytest.approx(TRUE.coefficients, rel=1e-6)


def test_a_line_is_fitted_through_what_a_known_engine_did() -> None:
    fit = LatencyFit(GUESS)
    for seed in range(8):
        told = engine(TRUE, seed)
        fit.forget()
        fit.observe(told, everyone(told))
    model, unseen = fit.model(), engine(TRUE, 99)
    work, seconds = spans(unseen)
    assert np.median(np.abs(work @ coefficients(model) / seconds - 1)) < 0.02
    assert model.iteration_s(16) == pytest.approx(TRUE.iteration_s(16), rel=0.2)


def test_pieces_by_hand() -> None:
    bends = BentEngine(1.0, (0.5, 0.25, 0.125), 0.0, 0.0, 0.0)
    batches = 1, 32, 33, 128, 130, 1000
    seconds = 1.5, 17.0, 17.25, 41.0, 41.25, 41.0 + 872 / 8
    assert [bends.iteration_s(batch) for batch in batches] == pytest.approx(list(seconds))


def test_bends_are_found_and_what_was_not_seen_stays_on_the_line() -> None:
    true = BentEngine(5e-3, (1e-5, 1e-4, 1e-4), 0.0, 3e-5, 0.0)  # free up to 32, and then dear
    fit = LatencyFit(GUESS, prior_weight=1e-3)
    for seed in range(10):
        told = engine(true, seed, sequences=100, longest_prompt=200)
        fit.observe(told, everyone(told))
    model, (work, seconds) = fit.model(), spans(engine(true, 99, sequences=100, longest_prompt=200))
    assert [model.iteration_s(batch) for batch in (8, 32, 64, 96)] == pytest.approx(
        [true.iteration_s(batch) for batch in (8, 32, 64, 96)], rel=0.1
    )
    assert model.sequence_s[0] < model.sequence_s[2] < model.sequence_s[1]
    assert np.median(np.abs(work @ coefficients(model) / seconds - 1)) < 0.005


def test_it_follows_an_engine_that_became_slower() -> None:
    slower = LinearEngine(*(2 * TRUE.coefficients).tolist())
    fit = LatencyFit(GUESS)
    for seed in range(40):
        told = engine(TRUE if seed < 20 else slower, seed)
        fit.forget()
        fit.observe(told, everyone(told))
    work, seconds = spans(engine(slower, 99))
    assert np.median(np.abs(work @ coefficients(fit.model()) / seconds - 1)) < 0.05


@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(1, 2000), st.floats(0, 50), st.floats(0.1, 50)),
        min_size=1,
        max_size=12,
    )
)
def test_no_coefficient_is_negative_whatever_is_seen(rows: list[tuple[int, int, float, float]]) -> None:
    told = requests([(prompt, tokens, start, start + took) for prompt, tokens, start, took in rows])
    work, seconds = spans(told)
    assert (work >= -1e-6 * np.abs(work).max()).all()
    assert (seconds > 0).all()
    fit = LatencyFit(GUESS)
    fit.observe(told, everyone(told))
    assert (coefficients(fit.model()) >= 0).all()
    assert np.isfinite(coefficients(fit.model())).all()
    assert fit.model().iteration_s(1) >= 0.01 * GUESS.iteration_s(1) * (1 - 1e-9)  # no plan can be made with 0


def test_requests_that_seem_to_begin_as_they_end_teach_nothing() -> None:
    """Their rows are divided by next to no time: 40 of 2,048 made every decode iteration free in a live run."""
    told = engine(TRUE, 1)
    begun = told.started_s.copy()
    begun[::10] = told.finished_s[::10] - 1e-7
    fit, knowing, wrong = LatencyFit(GUESS), LatencyFit(GUESS), dataclasses.replace(told, started_s=begun)
    fit.observe(wrong, everyone(wrong))
    knowing.observe(wrong, begun == told.started_s)
    assert fit.model() == knowing.model()


def test_what_moved_here_takes_its_slot_when_it_came() -> None:
    """By hand: two slots. x and y run from 0 to 4 and to 6; z waits for x, from 4 to 8. m began elsewhere at 0.5, moved
    here at 6 and ends at 9: counted from 0.5 it would have x's slot from 4 on, and z none before 6."""
    seen: list[tuple[list[float], list[bool]]] = []

    class Told(LatencyFit):
        def observe(self, requests: Requests, learn: np.ndarray) -> None:
            seen.append((requests.started_s.tolist(), learn.tolist()))

    spans_s = {"x": (0.1, 4), "y": (0.2, 6), "m": (0.5, 9), "z": (0.6, 8)}
    rows = [traced(1, name, tokens=10, started_s=start, finished_s=end) for name, (start, end) in spans_s.items()]
    Told(GUESS).observe_step([generating("a", 0, 8), generating("a", 6, 9)], rows, max_sequences=2)
    assert seen == [([0.1, 0.2, 4, 6], [True, True, True, False])]


def test_a_step_of_the_ledger_teaches_each_actor_its_own() -> None:
    told = engine(TRUE, 1)
    columns = told.prompt_tokens, told.response_tokens, told.started_s, told.finished_s
    rollouts = [
        traced(1, f"p{i}", prompt_tokens=int(prompt), tokens=int(n), actor=actor, started_s=start, finished_s=end)
        for actor in ("a", "b")
        for i, (prompt, n, start, end) in enumerate(zip(*columns, strict=True))
    ]
    calls = [generating(actor, 100.0, float(told.finished_s.max())) for actor in ("a", "b")]
    by_ledger, by_hand = LatencyFit(GUESS), LatencyFit(GUESS)
    by_ledger.observe_step(calls, rollouts, max_sequences=64)
    for _ in range(2):
        by_hand.observe(told, everyone(told))
    assert coefficients(by_ledger.model()) == pytest.approx(coefficients(by_hand.model()))
    # What came from another actor began before the call: it teaches nothing.
    moved = LatencyFit(GUESS)
    late = [dataclasses.replace(call, start_s=100.5) for call in calls]
    moved.observe_step(late, rollouts, max_sequences=64)
    assert coefficients(moved.model()) == pytest.approx(coefficients(bent(GUESS)))


@pytest.mark.skipif(not MEASURED, reason="RLHFLESS_MEASURED_RUNS names no folder of measured runs")
def test_measured_runs_are_predicted_within_a_tenth() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/latency.py"), str(MEASURED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    halves = [line.split() for line in ran.stdout.splitlines() if "fit, half" in line]
    assert len(halves) == 2
    assert all(float(row[3].rstrip("%")) <= 10 for row in halves)
