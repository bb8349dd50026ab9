"""What holds under any sequence of moves, releases, sleeps, starts and interruptions."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.recorded_run import CONTRACTS, Run, check_books
from fakes.tiny_scenario import (
    FOLDER,
    HEARTBEAT_S,
    LEARNER,
    MODEL,
    PRICES,
    REFERENCE,
    SCORING,
    actor,
    batch_of,
    on,
    play,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly, InTurns
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.sim.experiment.run import Clairvoyant
from rlhfless.sim.policies import POLICIES, make_policy
from rlhfless.sim.replay.recorded import steps_ahead
from rlhfless.sim.setup import Setup
from rlhfless.spec import AsyncSpec, CostAwareSpec, SyncSpec
from rlhfless.spec.fleet import ContractSpec

EXACT = 1e-9
"""Of sums in another order."""


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Up to three actors; the reference shares a device with the first one, the learner perhaps with the last."""
    count = draw(st.integers(1, 3))
    spot_mean_s = draw(st.sampled_from([math.inf, 20.0, 60.0]))
    actors = [actor(i, spot_mean_s=spot_mean_s, slowdown=draw(st.sampled_from([1.0, 2.0]))) for i in range(count)]
    lengths = st.lists(st.integers(1, 120), min_size=1, max_size=4)
    groups = st.lists(st.tuples(st.integers(1, 40), lengths), min_size=1, max_size=5)
    batches = [dataclasses.replace(batch_of(draw(groups)), step=step) for step in range(1, draw(st.integers(2, 4)))]
    ahead = draw(st.integers(0, 2))
    shared = not ahead and draw(st.booleans())
    learner = on(LEARNER, slot_setup(count - 1, start_s=1.0)) if shared else LEARNER
    seed = draw(st.integers(0, 1000))
    setup = setup_of(
        *actors,
        seed=seed,
        schedule=AsyncSpec(max_staleness=ahead, in_flight=draw(st.booleans())) if ahead else SyncSpec(),
        learner=learner,
        services=(SCORING, REFERENCE),
    )
    return Run(setup, batches, seed)


def calm(setup: Setup) -> Setup:
    """Without faults."""
    actors = tuple(dataclasses.replace(actor, spot_mean_s=math.inf) for actor in setup.actors)
    return dataclasses.replace(setup, actors=actors)


@given(runs())
@settings(max_examples=40)
def test_nothing_is_lost_doubled_or_billed_twice(run: Run) -> None:
    check_books(run, run.restless())


@given(run=runs(), contract=CONTRACTS)
@settings(max_examples=20)
def test_so_it_is_with_the_runs_own_scaler_under_any_contract(run: Run, contract: ContractSpec) -> None:
    check_books(run, make_policy("cost_aware", run=RunContract(contract, len(run.batches))))


@given(run=runs(), name=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=40)
def test_and_with_every_other_policy(run: Run, name: str) -> None:
    check_books(run, make_policy(name))


@given(run=runs(), contract=CONTRACTS)
@settings(max_examples=10)
def test_and_with_the_clairvoyant(run: Run, contract: ContractSpec) -> None:
    lengths = {batch.step: batch.response_tokens for batch in run.batches}
    terms = RunContract(contract, len(run.batches))
    check_books(run, CostAware(CostAwareSpec(), terms, Clairvoyant(lengths.__getitem__)))


@given(runs())
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_run(run: Run) -> None:
    first, second = (play(run.setup, run.batches, run.restless())[0] for _ in range(2))
    assert first == second


@given(runs(), st.floats(1e6, 1e10), st.booleans())
@settings(max_examples=20)
def test_more_bandwidth_never_takes_longer(run: Run, bytes_per_s: float, pulls: bool) -> None:
    ends = []
    for factor in (1, 3):
        transport = dataclasses.replace(FOLDER, load_bytes_per_s=factor * bytes_per_s)
        if pulls:
            transport = dataclasses.replace(FOLDER, home="node-0", pull_bytes_per_s=factor * bytes_per_s)
        between = steps_ahead(run.setup.schedule.steps_ahead)  # loads in flight interrupt samples at other tokens
        setup = dataclasses.replace(calm(run.setup), transport=transport, schedule=between)
        trace, _ = play(setup, run.batches, InTurns())
        ends.append(trace.steps[-1].end_s)
    assert ends[1] <= ends[0] * (1 + EXACT)


@given(runs(), st.floats(0.05, 5.0))
@settings(max_examples=20)
def test_stopping_more_often_changes_nothing(run: Run, heartbeat_s: float) -> None:
    """A policy that does nothing at heartbeats gets the same run with any interval. Where several steps are drawn at
    once, the end of one is seen at a heartbeat, and the weights that follow from it come to the others up to a
    heartbeat late."""
    traces = []
    for beats_s in (HEARTBEAT_S, heartbeat_s):
        setup = dataclasses.replace(run.setup, heartbeat_s=beats_s)
        between = steps_ahead(run.setup.schedule.steps_ahead)
        apart = dataclasses.replace(setup, services=(SCORING,), learner=LEARNER, schedule=between)
        traces.append(play(apart, run.batches, Evenly())[0])
    for left, right in zip(traces[0].steps, traces[1].steps, strict=True):
        assert left.end_s == pytest.approx(right.end_s, rel=1e-9)
    bills = [PRICES.cost_usd(trace.holdings) for trace in traces]
    assert bills[0] == pytest.approx(bills[1], rel=1e-9)


@given(runs())
@settings(max_examples=20)
def test_no_step_is_shorter_than_its_longest_response(run: Run) -> None:
    alone = dataclasses.replace(calm(run.setup), schedule=SyncSpec())  # otherwise a step is generated before its start
    trace, _ = play(alone, run.batches, InTurns())
    for batch, step in zip(run.batches, trace.steps, strict=True):
        prompts = batch.prompt_tokens[batch.group]
        alone_s = max(
            decode_s(MODEL, 1, int(prompt) + 1, int(length) - 1)
            for prompt, length in zip(prompts, batch.response_tokens, strict=True)
        )
        assert step.metrics["generation_s"] >= alone_s
        assert step.end_s - step.start_s >= step.metrics["generation_s"]
