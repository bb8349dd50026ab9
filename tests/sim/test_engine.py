"""The engine in closed form: worked by hand, equal to the naive loop, and what it must conserve."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.naive_engine import LinearModel, NaiveEngine, Sequence
from fakes.tiny_scenario import batch_of
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.engine_model import decode_s
from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel, SimulatedEngine
from rlhfless.sim.samples import RolloutBatch, StepProgress, rows_of

MODEL = LinearModel()
PRICES = PricedModel(MODEL, 64)
EXACT = 1e-9


def engine_of(batch: RolloutBatch, shape: EngineShape, at_s: float = 0.0, slowdown: float = 1.0) -> SimulatedEngine:
    return engine_in(StepProgress(batch), shape, at_s, slowdown)


def engine_in(progress: StepProgress, shape: EngineShape, at_s: float = 0.0, slowdown: float = 1.0) -> SimulatedEngine:
    return EnginePool(shape, PRICES, progress.at.table, [0]).open(0, progress, at_s, slowdown)


def everything(batch: RolloutBatch) -> np.ndarray:
    return np.arange(batch.samples)


def sequence_of(batch: RolloutBatch, sample: int) -> Sequence:
    group = int(batch.group[sample])
    tree = batch.tree
    prefixes = tuple((f"prefix {k}", int(tree.tokens[k])) for k in tree.lineage(int(tree.leaf[group])))
    return Sequence(sample, group, int(batch.prompt_tokens[group]), int(batch.response_tokens[sample]), prefixes)


ROOMY = EngineShape(max_sequences=64, kv_blocks=10_000, block_tokens=16, chunk_tokens=None)


def free_blocks(engine: SimulatedEngine) -> int:
    """KV blocks that no sequence holds."""
    return int(engine._n["free"])


def test_two_siblings_by_hand() -> None:
    """Prompt of 33 tokens: two whole blocks are shared, so the second sibling prefills one token."""
    batch = batch_of([(33, [3, 5])])
    engine = engine_of(batch, ROOMY)
    engine.submit(everything(batch), 0.0)
    assert engine.advance(math.inf).tolist() == [0, 1]
    first_s = MODEL.prefill_s(33) + MODEL.prefill_s(1, 32)
    third_s = first_s + decode_s(MODEL, 2, 2 * 34, 2)
    fifth_s = third_s + decode_s(MODEL, 1, 36, 2)
    assert engine.progress.table.finish_s == pytest.approx([third_s, fifth_s], rel=EXACT)
    assert (engine.counts["prefilled"], engine.counts["cached"], engine.counts["decoded"]) == (34, 32, 8)
    assert engine.periods == [(0.0, engine.now_s)]
    assert free_blocks(engine) == ROOMY.kv_blocks


def test_prompts_behind_one_prefix_by_hand() -> None:
    """A system prompt of 32 tokens, then 20 and 5: the second prompt finds the two blocks of 16."""
    tree = PrefixTree(np.array([32]), np.array([NONE]), np.array([0, 0]))
    batch = batch_of([(52, [1]), (37, [1])], tree)
    engine = engine_of(batch, ROOMY)
    engine.submit(everything(batch), 0.0)
    engine.advance(math.inf)
    assert engine.now_s == pytest.approx(MODEL.prefill_s(52) + MODEL.prefill_s(5, 32), rel=EXACT)
    assert (engine.counts["prefilled"], engine.counts["cached"], engine.counts["evicted"]) == (57, 32, 0)


def test_a_prefix_is_found_until_its_blocks_are_taken_by_hand() -> None:
    """Six blocks of 4. The first prompt leaves two of the prefix (of 8 tokens) and one of its own; the second takes
    three that were never used and the own one; the third then takes the prefix's last, and finds its first."""
    tree = PrefixTree(np.array([8]), np.array([NONE]), np.array([0, NONE, 0]))
    batch = batch_of([(9, [1]), (16, [2]), (9, [1])], tree)
    shape = EngineShape(max_sequences=1, kv_blocks=6, block_tokens=4, chunk_tokens=None)
    engine = engine_of(batch, shape)
    engine.submit(everything(batch), 0.0)
    engine.advance(math.inf)
    # 16 tokens and one drawn are 5 blocks: 3 unused ones, the first prompt's own, and the last of the prefix.
    assert engine.counts["prefilled"] == 9 + 16 + 5
    assert (engine.counts["cached"], engine.counts["evicted"]) == (4, 4)
    assert free_blocks(engine) == 6


def test_a_precomputed_prefix_by_hand() -> None:
    """In a call of its own before the samples."""
    tree = PrefixTree(np.array([32, 64]), np.array([NONE, 0]), np.array([1, 1]))
    batch = batch_of([(70, [1]), (75, [1])], tree)
    progress = StepProgress(batch)
    engine = engine_in(progress, ROOMY)
    assert not engine.has(3)
    done = engine.precompute([3], 1.0, 0.01)
    computed_s = 0.01 + MODEL.prefill_s(32) + MODEL.prefill_s(32, 32)
    assert (done.start_s, done.end_s) == pytest.approx((1.0, 1.0 + computed_s), rel=EXACT)
    assert (done.computed_tokens, done.cached_tokens) == (64, 0)
    assert engine.has(3)
    engine.submit(everything(batch), done.end_s)
    engine.advance(math.inf)
    assert (engine.counts["prefilled"], engine.counts["cached"]) == (6 + 11, 128)
    small = engine_in(StepProgress(batch), EngineShape(4, 5, 16, None)).precompute([3], 0.0, 0.0)
    assert small.computed_tokens == 64
    none = engine_in(StepProgress(batch), EngineShape(4, 5, 32, None)).precompute([3], 0.0, 0.0)
    assert none.computed_tokens == 64


def test_preemption_by_hand() -> None:
    """Five blocks of 4. Both hold two after the prefill of 5; at 9 tokens each needs a third, and one is left."""
    batch = batch_of([(5, [8]), (5, [8])])
    shape = EngineShape(max_sequences=2, kv_blocks=5, block_tokens=4, chunk_tokens=None)
    engine = engine_of(batch, shape)
    engine.submit(everything(batch), 0.0)
    engine.advance(math.inf)
    # Four tokens each, then the later one leaves; the other draws its last four alone; then 9 tokens are prefilled, of
    # which the first block is still in the cache.
    apart_s = 2 * MODEL.prefill_s(5) + decode_s(MODEL, 2, 12, 3)
    first_s = apart_s + decode_s(MODEL, 1, 9, 4)
    second_s = first_s + MODEL.prefill_s(5, 4) + decode_s(MODEL, 1, 10, 3)
    assert engine.progress.table.finish_s == pytest.approx([first_s, second_s], rel=EXACT)
    assert engine.counts["preempted"] == 1


def test_chunked_prefill_by_hand() -> None:
    """Ten tokens a turn: the first prompt takes 4, the second 6 of its 8, then 2 beside the first one's decoding."""
    batch = batch_of([(4, [3]), (8, [1])])
    shape = EngineShape(max_sequences=2, kv_blocks=100, block_tokens=4, chunk_tokens=10)
    engine = engine_of(batch, shape)
    engine.submit(everything(batch), 0.0)
    assert engine.advance(math.inf).tolist() == [1, 0]
    first_s = MODEL.prefill_s(4) + MODEL.prefill_s(6)
    second_s = first_s + MODEL.prefill_s(2, 6) + decode_s(MODEL, 1, 5, 1)
    third_s = second_s + decode_s(MODEL, 1, 6, 1)
    assert engine.progress.table.finish_s == pytest.approx([third_s, second_s], rel=EXACT)


def test_abort_waits_for_the_iteration_and_crash_does_not() -> None:
    batch = batch_of([(10, [50])])
    start_s = MODEL.prefill_s(10)
    fifth_s = start_s + decode_s(MODEL, 1, 11, 5)
    sixth_s = start_s + decode_s(MODEL, 1, 11, 6)
    between_s = (fifth_s + sixth_s) / 2
    engine = engine_of(batch, ROOMY)
    engine.submit(everything(batch), 0.0)
    assert engine.abort(everything(batch), between_s) == pytest.approx(sixth_s, rel=EXACT)
    assert engine.progress.table.tokens.tolist() == [7]
    assert free_blocks(engine) == ROOMY.kv_blocks
    crashed = engine_of(batch, ROOMY)
    crashed.submit(everything(batch), 0.0)
    assert crashed.crash(between_s).tolist() == [0]
    assert crashed.progress.table.tokens.tolist() == [0]
    assert crashed.periods == [(0.0, between_s)]


def test_a_sample_that_ends_in_the_iteration_before_a_load_has_ended() -> None:
    """Of two samples one ends with the iteration that the load of weights waits for."""
    batch = batch_of([(10, [6]), (10, [50])])
    engine = engine_of(batch, ROOMY)
    engine.submit(everything(batch), 0.0)
    begun_s = MODEL.prefill_s(10) * 2
    fifth_s, sixth_s = (begun_s + decode_s(MODEL, 2, 2 * 11, iterations) for iterations in (4, 5))
    assert engine.reload((fifth_s + sixth_s) / 2, 1.0) == pytest.approx(sixth_s, rel=EXACT)
    assert engine.resident.tolist() == [1]
    engine.advance(math.inf)
    assert engine.progress.unfinished == 0


def test_faults_of_the_caller_are_named() -> None:
    with pytest.raises(ValueError, match=r"chunk_tokens \(8\) is below max_sequences \(16\)"):
        EngineShape(16, 100, 16, 8)
    with pytest.raises(ValueError, match="kv_blocks is 0"):
        EngineShape(16, 0, 16, None)
    with pytest.raises(ValueError, match="an engine has 65 sequences, and prices are of 64; price them all"):
        engine_of(batch_of([(4, [1])]), EngineShape(65, kv_blocks=10, block_tokens=16, chunk_tokens=None))
    batch = batch_of([(100, [100])])
    engine = engine_of(batch, EngineShape(4, 12, 16, None))
    with pytest.raises(ValueError, match="needs 13 KV blocks of 16, and the engine has 12"):
        engine.submit(everything(batch), 0.0)


@dataclass(frozen=True)
class Scenario:
    """Groups, a shape that at least fits each sample alone, and what is done from outside, at which times."""

    batch: RolloutBatch
    shape: EngineShape
    slowdown: float
    arrivals: tuple[float, ...]  # [samples], ascending
    cuts: tuple[tuple[float, frozenset[int]], ...]  # time, samples that are aborted and submitted again then
    drawn: tuple[int, ...] = ()  # [samples]: tokens that it comes with, and with their KV; 0: it comes with none


@st.composite
def trees(draw: st.DrawFn, prompts: list[int]) -> PrefixTree:
    """Prefixes of prompts of these lengths, nested at random."""
    tokens: list[int] = []
    parent: list[int] = []
    for number in range(draw(st.integers(0, 3))):
        above = draw(st.integers(NONE, number - 1))
        least = 0 if above == NONE else tokens[above]
        tokens.append(least + draw(st.integers(1, 12)))
        parent.append(above)
    fitting = [[NONE, *(k for k, shared in enumerate(tokens) if shared < prompt)] for prompt in prompts]
    leaf = [draw(st.sampled_from(choices)) for choices in fitting]
    return PrefixTree(*(np.array(column, dtype=np.int64) for column in (tokens, parent, leaf)))


@st.composite
def scenarios(draw: st.DrawFn, *, with_cuts: bool = True) -> Scenario:
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)
    groups = draw(st.lists(st.tuples(st.integers(1, 50), lengths), min_size=1, max_size=5))
    batch = batch_of(groups, draw(trees([prompt for prompt, _ in groups])))
    block = draw(st.sampled_from([1, 2, 4, 7, 16]))
    longest = max(-(-(prompt + max(responses)) // block) for prompt, responses in groups)
    slots = draw(st.integers(1, 9))
    shape = EngineShape(
        max_sequences=slots,
        kv_blocks=longest + draw(st.integers(0, 3 * longest)),
        block_tokens=block,
        chunk_tokens=draw(st.none() | st.integers(slots, slots + 40)),
    )
    count = batch.samples
    instants = st.floats(0.0, 3.0, allow_nan=False)
    arrivals = sorted(draw(st.lists(instants | st.just(0.0), min_size=count, max_size=count)))
    some = st.frozensets(st.integers(0, count - 1))
    cuts = draw(st.lists(st.tuples(instants, some), max_size=3)) if with_cuts else []
    slowdown = draw(st.sampled_from([1.0, 1.7]))
    drawn = tuple(draw(st.just(0) | st.integers(0, length - 1)) for length in batch.response_tokens.tolist())
    return Scenario(batch, shape, slowdown, tuple(arrivals), tuple(sorted(cuts, key=lambda cut: cut[0])), drawn)


def outside(scenario: Scenario) -> list[tuple[float, frozenset[int] | int]]:
    """Arrivals and cuts in order of time."""
    arrivals = [(at_s, sample) for sample, at_s in enumerate(scenario.arrivals)]
    return sorted([*arrivals, *scenario.cuts], key=lambda event: event[0])


def play(scenario: Scenario, stops: tuple[float, ...] = ()) -> SimulatedEngine:
    """Plays a scenario, with needless stops in between."""
    engine = engine_of(scenario.batch, scenario.shape, slowdown=scenario.slowdown)
    engine.progress.table.tokens[:] = scenario.drawn
    for at_s, what in outside(scenario):
        for stop_s in stops:
            if engine.now_s < stop_s < at_s:
                engine.advance(stop_s)
        if isinstance(what, int):
            engine.advance(at_s)
            engine.submit(np.array([what]), max(at_s, engine.now_s))
        else:
            engine.advance(at_s)
            within = set(engine.resident.tolist())
            boundary_s = engine.abort(np.array(sorted(what), dtype=np.int64), at_s)
            back = sorted(sample for sample in what & within if not engine.progress.table.finished[sample])
            engine.submit(np.array(back, dtype=np.int64), boundary_s)
    for stop_s in sorted(stops):
        engine.advance(max(stop_s, engine.now_s))
    engine.advance(math.inf)
    return engine


def play_naively(scenario: Scenario) -> NaiveEngine:
    engine = NaiveEngine(scenario.shape, MODEL, slowdown=scenario.slowdown)
    for at_s, what in outside(scenario):
        if isinstance(what, int):
            engine.advance(at_s)
            arriving = sequence_of(scenario.batch, what)
            arriving.tokens = scenario.drawn[what]
            engine.submit(arriving, max(at_s, engine.now_s))
        else:
            boundary_s, tokens = engine.abort(set(what), at_s)
            for sample in sorted(tokens):
                back = sequence_of(scenario.batch, sample)
                back.tokens = tokens[sample]
                engine.submit(back, boundary_s)
    engine.advance(math.inf)
    return engine


@given(scenarios())
@settings(max_examples=150)
def test_closed_form_equals_the_naive_loop(scenario: Scenario) -> None:
    engine, naive = play(scenario), play_naively(scenario)
    expected = [naive.finish_s[sample] for sample in range(scenario.batch.samples)]
    assert engine.progress.table.finish_s == pytest.approx(expected, rel=EXACT)
    assert engine.now_s == pytest.approx(naive.now_s, rel=EXACT)
    assert engine.counts["preempted"] == naive.preemptions
    counted = (engine.counts["prefilled"], engine.counts["cached"], engine.counts["evicted"])
    assert counted == (naive.prefilled, naive.cached, naive.evicted)


@given(scenarios())
@settings(max_examples=50)
def test_nothing_is_lost_or_left_behind(scenario: Scenario) -> None:
    engine = play(scenario)
    assert engine.progress.finished.all()
    assert engine.counts["decoded"] == scenario.batch.response_tokens.sum() - sum(scenario.drawn)
    assert free_blocks(engine) == scenario.shape.kv_blocks
    assert engine.resident.tolist() == []
    assert sum(end - start for start, end in engine.periods) <= engine.now_s * (1 + EXACT)


@given(scenarios(), st.lists(st.floats(0.0, 5.0, allow_nan=False), max_size=6))
@settings(max_examples=50)
def test_stopping_in_between_changes_nothing(scenario: Scenario, stops: list[float]) -> None:
    whole, split = play(scenario), play(scenario, tuple(sorted(stops)))
    assert split.progress.table.finish_s == pytest.approx(whole.progress.table.finish_s, rel=EXACT)
    assert split.counts["preempted"] == whole.counts["preempted"]


@given(scenarios(with_cuts=False))
@settings(max_examples=50)
def test_makespan_is_at_least_the_longest_response_alone(scenario: Scenario) -> None:
    engine = play(scenario)
    alone_s = max(
        decode_s(MODEL, 1, int(scenario.batch.prompt_tokens[group]) + drawn + 1, int(length) - drawn - 1)
        for group, length, drawn in zip(
            scenario.batch.group, scenario.batch.response_tokens, scenario.drawn, strict=True
        )
    )
    assert engine.now_s >= alone_s * (1 - EXACT)


def two_steps(first: RolloutBatch, second: RolloutBatch, shape: EngineShape, engines: int) -> list[SimulatedEngine]:
    """Submit two steps to the same engines, sample by sample in turn, and return the engines of each step."""
    batches = [first, second]
    samples, nodes = max(b.samples for b in batches), max(b.groups + len(b.tree) for b in batches)
    rows = rows_of(2, samples, nodes)
    pool = EnginePool(shape, PRICES, rows[0].table, range(engines))
    opened = []
    for batch, of in zip(batches, rows, strict=True):
        progress = StepProgress(batch, of)
        for slot in range(engines):
            engine = pool.open(slot, progress, 0.0, 1.0 + 0.1 * slot)
            engine.submit(everything(batch)[slot::engines], 0.0)
            opened.append(engine)
    return opened


@settings(max_examples=60, deadline=None)
@given(scenarios(with_cuts=False), scenarios(with_cuts=False), st.integers(1, 3))
def test_engines_that_run_in_the_order_of_time_stop_at_the_end_of_a_step(
    first: Scenario, second: Scenario, engines: int
) -> None:
    """Run alone, one after the other, they go further, and find the same times."""
    longest = max(int((s.batch.prompt_tokens[s.batch.group] + s.batch.response_tokens).max()) for s in (first, second))
    shape = replace(first.shape, kv_blocks=max(first.shape.kv_blocks, -(-longest // first.shape.block_tokens)))
    alone, together = (two_steps(first.batch, second.batch, shape, engines) for _ in range(2))
    alone[0]._pool.advance(math.inf)
    pool, ends_s = together[0]._pool, []
    pool.run(math.inf)
    while pool.stopped:
        steps = {id(engine.progress): engine.progress for engine in together}.values()
        ends_s.append(max(step.table.finish_s.max() for step in steps if not step.unfinished))
        assert all(engine.now_s <= ends_s[-1] for engine in together)
        assert pool.next_s >= ends_s[-1]
        assert max(step.table.finish_s[step.finished].max(initial=0.0) for step in steps) == ends_s[-1]
        pool.run(math.inf)
    finish_s = [engine.progress.table.finish_s for engine in alone]
    earlier, later = sorted([finish_s[0].max(), finish_s[-1].max()])
    expected = [earlier] if later == pytest.approx(earlier, rel=EXACT) else [earlier, later]
    assert ends_s == pytest.approx(expected, rel=EXACT)
    for one, other in zip(alone, together, strict=True):
        assert other.progress.table.finish_s == pytest.approx(one.progress.table.finish_s, rel=EXACT)
