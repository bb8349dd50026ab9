"""Samples that wait for their environment leave their actor, and return when it has answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import recorded_run as recorded
from fakes.tiny_scenario import batch_of, called, play
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.policies import make_policy
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch
from rlhfless.sim.setup import ServiceShape, Setup
from rlhfless.spec import WeightedSpec


def waiting_setup(park_s: float, actors: int = 1) -> Setup:
    setup = recorded._setup(actors)
    answers = ServiceShape(setup.services[0].slot_setup, FunctionName.ENVIRONMENT, None, 0.0, 0.0)
    shapes = tuple(replace(actor, engine=replace(actor.engine, park_s=park_s)) for actor in setup.actors)
    return replace(setup, actors=shapes, services=(answers,), max_tokens=400)


def waiting_batch(wait_s: float, samples: int = 4, turns: int = 3) -> RolloutBatch:
    """Groups of two samples, each turn of 20 tokens, with 5 of the environment after it."""
    length = 25 * turns - 5
    count, shape = np.full(samples, turns), (samples, 1)
    end = np.tile(25 * np.arange(turns) + 20, shape).ravel()
    given = np.tile(np.append(np.full(turns - 1, 5), 0), shape).ravel()
    waits = np.tile(np.append(np.full(turns - 1, wait_s), 0.0), shape).ravel()
    nothing = np.zeros(samples)
    batch = batch_of([(7, [length] * 2)] * (samples // 2))
    return replace(batch, turns=EpisodeTurns(count, nothing.astype(np.int64), end, given, waits, nothing))


@pytest.mark.parametrize("actors", [1, 2])
def test_a_parked_sample_takes_no_longer(actors: int) -> None:
    """It returns to the actor that has its KV, at the instant of the answer."""
    batch = waiting_batch(10.0)
    stayed, (kept,) = play(waiting_setup(60.0, actors), [batch], make_policy("static"))
    parted, (left,) = play(waiting_setup(1.0, actors), [batch], make_policy("static"))
    assert left.finish_s == pytest.approx(kept.finish_s, abs=1e-6)
    assert left.tokens.tolist() == kept.tokens.tolist() == batch.response_tokens.tolist()
    calls, one = called(parted, Work.GENERATE), called(stayed, Work.GENERATE)
    assert len(one) == actors
    assert sum(call.duration_s for call in one) > actors * 20
    assert sum(call.duration_s for call in calls) < actors * 5  # three turns, and 1 s of each of two waits
    assert sum(call.output_tokens for call in calls) == 4 * 60
    assert sum(call.input_tokens - call.cached_tokens for call in calls) == sum(
        call.input_tokens - call.cached_tokens for call in one
    )


PRICED = load_price_book()


def played(policy: Any, wait_s: float, start_s: float = 10.0) -> tuple[Trace, float]:
    """The trace of four steps on two actors, and the seconds for which actors held their devices."""
    setup = waiting_setup(5.0, 2)
    actors = tuple(
        replace(actor, slot_setup=replace(actor.slot_setup, start_s=start_s, beside=True)) for actor in setup.actors
    )
    batches = [replace(waiting_batch(wait_s, samples=16), step=step) for step in range(1, 5)]
    trace, _ = play(replace(setup, actors=actors, warm=True), batches, policy, PRICED)
    held = [row.end_s - row.start_s for row in trace.holdings if row.function == FunctionName.GENERATION]
    return trace, sum(held)


def test_actors_whose_samples_all_wait_are_released_and_started_in_time() -> None:
    """Two waits of 100 s per step, against a start of 10 s: the fleet of `static` is paid for 200 s longer."""
    kept, kept_s = played(make_policy("static"), 100.0)
    left, left_s = played(make_policy("cost_aware"), 100.0)
    assert left_s < 0.5 * kept_s
    assert left.steps[-1].end_s < 1.1 * kept.steps[-1].end_s
    assert sum(call.output_tokens for call in called(left, Work.GENERATE)) == 4 * 16 * 60


def test_a_short_wait_is_not_worth_a_start() -> None:
    kept, kept_s = played(make_policy("static"), 7.0)
    left, left_s = played(make_policy("cost_aware"), 7.0)
    starts = [row for row in left.holdings if row.function == FunctionName.GENERATION]
    assert left_s < 1.02 * kept_s
    assert left.steps[-1].end_s < 1.02 * kept.steps[-1].end_s
    assert starts


def test_a_plan_counts_the_waits_that_it_has_seen() -> None:
    """More actors shorten the generation of a step, but not its waits: once these are known, fewer actors are paid."""

    def planned(wait_s: float) -> list[int]:
        setup = waiting_setup(60.0, 4)
        batches = [replace(waiting_batch(wait_s, samples=64), step=step) for step in range(1, 4)]
        policy = make_policy("cost_aware", None, RunContract(WeightedSpec(time_weight=0.5)))
        trace, _ = play(replace(setup, warm=True), batches, policy, PRICED)
        return [int(row.choice.split()[0]) for row in trace.decisions if row.kind == "plan"]

    without, with_waits = planned(0.0), planned(10.0)
    assert with_waits[0] == without[0]
    assert with_waits[1:] < without[1:]
    assert set(with_waits[1:]) == {1}
