"""The fit by replay: it finds an engine under memory pressure, where reading iterations off the requests does not."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fit import Served, fit_by_replay, replayed_s

from rlhfless.scaling.latency.fitted import LatencyFit, LinearEngine
from rlhfless.scaling.latency.timeline import Requests
from rlhfless.sim.engine import EngineShape

TRUE = LinearEngine(fixed_s=0.012, sequence_s=2e-4, context_s=4e-8, prefill_token_s=6e-5, prefill_context_s=1e-9)
GUESS = LinearEngine(fixed_s=0.006, sequence_s=1e-4, context_s=8e-8, prefill_token_s=3e-5, prefill_context_s=2e-9)
FEW_BLOCKS = EngineShape(max_sequences=64, kv_blocks=300, block_tokens=16, chunk_tokens=2048)
"""300 blocks hold five of the 80 requests at their full length."""


def served(shape: EngineShape, seed: int = 0, count: int = 80) -> Served:
    random = np.random.default_rng(seed)
    prompts, responses = random.integers(50, 600, count), random.integers(20, 500, count)
    asked_s = np.sort(random.uniform(0.0, 10.0, count))
    asked = Served(prompts, responses, asked_s, asked_s)
    return Served(prompts, responses, asked_s, replayed_s(TRUE, shape, asked))


def off(engine: LinearEngine, run: Served, judged: np.ndarray) -> float:
    took_s, real_s = replayed_s(engine, FEW_BLOCKS, run) - run.asked_s, run.finished_s - run.asked_s
    return float(np.median(np.abs(took_s / real_s - 1)[judged]))


def test_an_engine_with_few_blocks_is_found_from_half_of_its_requests() -> None:
    run = served(FEW_BLOCKS)
    learn = np.arange(len(run.asked_s)) < len(run.asked_s) // 2
    found = fit_by_replay(run, FEW_BLOCKS, GUESS, learn)
    assert off(found, run, ~learn) < 0.02
    by_spans = LatencyFit(GUESS)
    by_spans.observe(
        Requests(
            run.prompt_tokens.astype(float),
            np.zeros(len(run.asked_s)),
            run.response_tokens.astype(float),
            run.asked_s,
            run.finished_s,
        ),
        learn,
    )
    assert off(LinearEngine.of(by_spans.model()), run, ~learn) > 10 * off(found, run, ~learn)


def test_a_replay_waits_for_memory() -> None:
    run = served(FEW_BLOCKS)
    plenty = EngineShape(max_sequences=64, kv_blocks=100_000, block_tokens=16, chunk_tokens=2048)
    assert replayed_s(TRUE, plenty, run).max() < run.finished_s.max() / 2


def test_what_cannot_be_fitted_is_refused() -> None:
    run = served(FEW_BLOCKS)
    with pytest.raises(ValueError, match="no request is judged"):
        fit_by_replay(run, FEW_BLOCKS, GUESS, np.zeros(len(run.asked_s), bool))
    tiny = EngineShape(max_sequences=64, kv_blocks=10, block_tokens=16, chunk_tokens=2048)
    with pytest.raises(ValueError, match="raise kv_blocks"):
        replayed_s(TRUE, tiny, run)
