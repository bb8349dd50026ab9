"""Devices taken in turns, worked by hand: which replica waits for which, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fakes.tiny_scenario import (
    LEARNER,
    PRICES,
    REFERENCE,
    SCORING,
    SLEEP_S,
    WAKE_S,
    actor,
    batch_of,
    called,
    on,
    one_step,
    play,
    repeated,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly, Scripted
from rlhfless.orchestrator.group_pipeline import WINDOW_S
from rlhfless.records import ReplicaState, Work
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import (
    Action,
    Event,
    Generated,
    Heartbeat,
    Release,
    StepView,
)
from rlhfless.sim.strict import SimulationError


def test_functions_take_turns_of_whole_phases() -> None:
    """The first group is complete early, and the reference waits until generation has ended: 0.25 s until the actor
    sleeps, 0.7 s of a cold start. It has asked for the first group alone, and computes the second one next. In the
    second step the actor waits for the learner to fall asleep, and wakes, and the reference wakes."""
    setup = setup_of(actor(0), services=(REFERENCE,), learner=on(LEARNER, slot_setup(0, start_s=1.0)))
    trace, steps = play(setup, repeated(batch_of([(5, [3]), (5, [200])]), 2), Evenly())
    ends = [step.end_s for step in steps]
    first, next_one, second, last = called(trace, Work.LOGPROBS)
    assert next_one.start_s == pytest.approx(first.end_s)
    assert first.start_s == pytest.approx(ends[0] + SLEEP_S + 0.7)
    assert second.start_s == pytest.approx(ends[1] + SLEEP_S + WAKE_S)
    learned = called(trace, Work.LEARN)
    assert learned[0].start_s == pytest.approx(next_one.end_s + SLEEP_S + 1.0)
    assert learned[1].start_s == pytest.approx(last.end_s + SLEEP_S + WAKE_S)
    drawn = called(trace, Work.GENERATE)
    began_s = trace.steps[1].start_s
    assert drawn[1].start_s == pytest.approx(began_s + SLEEP_S + WAKE_S + 0.3)  # and the load of the weights
    awake = [row for row in trace.holdings if row.device == "h100-0" and row.state is not ReplicaState.SLEEPING]
    spans = sorted((row.start_s, row.end_s) for row in awake)
    assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in pairwise(spans))  # one owner at a time


def test_a_released_actor_s_device_waits_for_the_end_of_generation() -> None:
    """The actors' turn is one turn on all of their devices."""

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        free = isinstance(event, Heartbeat) and view.slots[0].state is ReplicaState.SERVING
        return (Release(0),) if free and not len(view.samples_at(0)) else ()

    setup = setup_of(actor(0), actor(1), services=(REFERENCE,))
    trace, step = one_step(setup, Scripted(answer), batch_of([(5, [3]), (5, [200]), (5, [4])]))
    released_s = next(hold.end_s for hold in trace.holdings if hold.state is ReplicaState.SERVING)
    assert step.finish_s[2] < released_s < step.end_s
    first = called(trace, Work.LOGPROBS)[0]
    assert first.start_s == pytest.approx(step.end_s + SLEEP_S + 0.7)


def test_the_learner_is_never_released() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(2),) if isinstance(event, Generated) else ()

    setup = setup_of(actor(0), learner=on(LEARNER, slot_setup(0)))
    with pytest.raises(SimulationError, match="slot 2 is released, and its learner keeps the run's state"):
        one_step(setup, Scripted(answer), batch_of([(5, [3])]))


def test_a_service_beside_an_actor_does_not_wait() -> None:
    cores = {"allocation": Allocation.of([Device("cpu-core-0", "cpu-core", 0)], 0.5), "beside": True}
    shared = setup_of(
        actor(0, slot_setup=slot_setup(0, **cores)), services=(on(SCORING, slot_setup(0, start_s=0.7, **cores)),)
    )
    trace, step = one_step(shared, Evenly(), batch_of([(5, [3]), (5, [100])]))
    first = called(trace, Work.SCORE)[0]
    assert first.start_s == pytest.approx(step.finish_s[0] + WINDOW_S + 0.7)
    whole = {"allocation": Allocation.of([Device("cpu-core-0", "cpu-core", 0)], 0.75), "beside": True}
    with pytest.raises(ValueError, match=r"shares of device 'cpu-core-0' add up to 1\.25; lower them"):
        dataclasses.replace(shared, services=(on(SCORING, slot_setup(0, **whole)),))


def test_a_device_that_is_used_in_turns_is_paid_for_once() -> None:
    """The actor sleeps while the learner is awake on its device, and the other way round."""
    setup = setup_of(actor(0), learner=on(LEARNER, slot_setup(0, start_s=1.0)))
    trace, _ = play(setup, repeated(batch_of([(5, [30])]), 2), Evenly())
    rows = [row for row in trace.holdings if row.device == "h100-0"]
    # The device is held from the node's arrival on, without a gap, and once.
    assert sum(row.device_s for row in rows) == pytest.approx(trace.steps[-1].end_s - 5.0)
    assert PRICES.cost_usd(rows) == pytest.approx((trace.steps[-1].end_s - 5.0) * 3.6 / 3600)
    assert called(trace, Work.SLEEP)
