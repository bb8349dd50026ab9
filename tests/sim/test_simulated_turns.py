"""Episodes in the closed form: worked by hand, and equal to the naive loop. While a sample waits, it holds nothing."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.naive_engine import LinearModel, NaiveEngine, Sequence
from fakes.tiny_scenario import batch_of
from rlhfless.scaling.engine_model import decode_s
from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel, SimulatedEngine
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch, StepProgress

MODEL = LinearModel()
PRICES = PricedModel(MODEL, 64)
EXACT = 1e-9
ROOMY = EngineShape(max_sequences=8, kv_blocks=1000, block_tokens=16, chunk_tokens=None)

Turn = tuple[int, int, float]
"""(tokens of the model, tokens of the environment after it, seconds until then)."""


def episodes(prompts: list[int], turns: list[list[Turn]], opening: int = 0, reset_s: float = 0.0) -> RolloutBatch:
    """Return a batch of groups of one sample each."""
    count = np.array([len(each) for each in turns])
    end = np.concatenate([np.cumsum([own + given for own, given, _ in each]) for each in turns])
    rows = [row for each in turns for row in each]
    given = np.array([row[1] for row in rows])
    lengths = [sum(own + given for own, given, _ in each) for each in turns]
    batch = batch_of([(prompt, [length]) for prompt, length in zip(prompts, lengths, strict=True)])
    opened = np.full(len(turns), opening)
    reset_s = np.full(len(turns), reset_s)
    return replace(
        batch, turns=EpisodeTurns(count, opened, end - given, given, np.array([row[2] for row in rows]), reset_s)
    )


def engine_of(batch: RolloutBatch, shape: EngineShape) -> SimulatedEngine:
    progress = StepProgress(batch)
    return EnginePool(shape, PRICES, progress.at.table, [0]).open(0, progress, 0.0)


def test_an_episode_by_hand() -> None:
    """A prompt of 33 tokens, a turn of 5, an answer of 10 after 2 s, and a turn of 3. The second turn has a context of
    48 tokens, of which the cache has the two whole blocks of the first turn's 37: it prefills 16."""
    batch = episodes([33], [[(5, 10, 2.0), (3, 0, 0.0)]])
    engine = engine_of(batch, ROOMY)
    engine.submit(np.arange(1), 0.0)
    first_s = MODEL.prefill_s(33) + decode_s(MODEL, 1, 34, 4)
    engine.advance(first_s + 1.0)
    assert (engine.running, engine.waiting, int(engine._n["free"])) == (0, 1, 1000)
    assert engine.progress.table.tokens.tolist() == [15]
    engine.advance(math.inf)
    last_s = first_s + 2.0 + MODEL.prefill_s(16, 32) + decode_s(MODEL, 1, 49, 2)
    assert engine.progress.table.finish_s == pytest.approx([last_s], rel=EXACT)
    assert engine.counts["decoded"] == 8
    assert (engine.counts["prefilled"], engine.counts["cached"]) == (33 + 16, 32)


def test_a_wait_goes_on_at_another_engine() -> None:
    """The episode is opened after 1.5 s. Migrated 1 s into a wait of 2 s, the sample waits for another second, and its
    KV is computed again."""
    batch = episodes([33], [[(5, 10, 2.0), (3, 0, 0.5)]], reset_s=1.5)
    progress = StepProgress(batch)
    pool = EnginePool(ROOMY, PRICES, progress.at.table, [0, 1])
    first, second = pool.open(0, progress, 0.0), pool.open(1, progress, 0.0)
    first.submit(np.arange(1), 0.0)
    asked_s = 1.5 + MODEL.prefill_s(33) + decode_s(MODEL, 1, 34, 4)
    first.advance(asked_s + 1.0)
    assert first.abort(np.arange(1), asked_s + 1.0) == pytest.approx(asked_s + 1.0)
    second.submit(np.arange(1), asked_s + 1.0)
    second.advance(math.inf)
    last_s = asked_s + 2.0 + MODEL.prefill_s(48) + decode_s(MODEL, 1, 49, 2) + 0.5
    assert progress.table.finish_s == pytest.approx([last_s], rel=EXACT)


def test_a_lost_turn_is_generated_again_and_its_call_is_not_made_again() -> None:
    """The actor dies 1 s into a wait of 2 s: the turn is generated again, and has its answer at the same time."""
    batch = episodes([33], [[(5, 10, 2.0), (3, 0, 0.0)]])
    engine = engine_of(batch, ROOMY)
    engine.submit(np.arange(1), 0.0)
    asked_s = MODEL.prefill_s(33) + decode_s(MODEL, 1, 34, 4)
    assert engine.crash(asked_s + 1.0).tolist() == [0]
    assert engine.progress.table.tokens.tolist() == [0]
    engine.drop_kv()
    engine.submit(np.arange(1), asked_s + 1.0)
    engine.advance(math.inf)
    last_s = asked_s + 2.0 + MODEL.prefill_s(16, 32) + decode_s(MODEL, 1, 49, 2)
    assert engine.progress.table.finish_s == pytest.approx([last_s], rel=EXACT)


def test_turns_that_do_not_fit_their_responses_are_refused() -> None:
    batch = episodes([4], [[(2, 1, 0.0), (2, 0, 0.0)]])
    assert batch.turns is not None
    with pytest.raises(ValueError, match="follow each other, and end with its response"):
        replace(batch, turns=replace(batch.turns, end=np.array([2, 4])))
    with pytest.raises(ValueError, match="negative wait or number of tokens: -1"):
        replace(batch, turns=replace(batch.turns, wait_s=np.array([-1.0, 0.0])))


@st.composite
def played(draw: st.DrawFn) -> tuple[RolloutBatch, EngineShape, list[float]]:
    wait = st.just(0.0) | st.floats(0.0, 2.0, allow_nan=False)
    turn = st.tuples(st.integers(1, 20), st.integers(0, 20), wait)
    turns = draw(st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=6))
    turns = [[*each[:-1], (each[-1][0], 0, each[-1][2])] for each in turns]
    prompts = [draw(st.integers(1, 40)) for _ in turns]
    batch = episodes(prompts, turns, draw(st.integers(0, 9)))
    block = draw(st.sampled_from([1, 4, 7, 16]))
    longest = max(-(-int(tokens) // block) for tokens in batch.context_tokens + batch.response_tokens)
    slots = draw(st.integers(1, 7))
    shape = EngineShape(
        slots, longest + draw(st.integers(0, 3 * longest)), block, draw(st.none() | st.integers(slots, slots + 40))
    )
    arrivals = sorted(draw(st.lists(st.floats(0.0, 2.0, allow_nan=False), min_size=len(turns), max_size=len(turns))))
    return batch, shape, arrivals


def play_naively(batch: RolloutBatch, shape: EngineShape, arrivals: list[float]) -> NaiveEngine:
    naive, turns = NaiveEngine(shape, MODEL), batch.turns
    assert turns is not None
    for sample, at_s in enumerate(arrivals):
        rows = range(int(turns.first[sample]), int(turns.first[sample] + turns.count[sample]))
        left = deque((int(turns.given[a]), float(turns.wait_s[a]), int(turns.end[b])) for a, b in pairwise(rows))
        left.append((0, float(turns.wait_s[rows[-1]]), 0))
        opening, end = int(turns.opening[sample]), int(turns.end[rows[0]])
        naive.advance(at_s)
        arriving = Sequence(sample, sample, int(batch.prompt_tokens[sample]), end, opening=opening, turns=left)
        naive.submit(arriving, max(at_s, naive.now_s))
        naive.queue = deque(sorted(naive.queue, key=lambda each: each.arrival_s))
    naive.advance(math.inf)
    return naive


@given(played())
@settings(max_examples=150, deadline=None)
def test_closed_form_equals_the_naive_loop(scenario: tuple[RolloutBatch, EngineShape, list[float]]) -> None:
    batch, shape, arrivals = scenario
    engine, naive = engine_of(batch, shape), play_naively(*scenario)
    for sample, at_s in enumerate(arrivals):
        engine.advance(at_s)
        engine.submit(np.array([sample]), max(at_s, engine.now_s))
    engine.advance(math.inf)
    assert engine.progress.table.finish_s == pytest.approx([naive.finish_s[s] for s in range(batch.samples)], rel=EXACT)
    counted = tuple(engine.counts[name] for name in ("preempted", "prefilled", "cached", "evicted"))
    assert counted == (naive.preemptions, naive.prefilled, naive.cached, naive.evicted)
    assert int(engine._n["free"]) == shape.kv_blocks
