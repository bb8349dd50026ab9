"""Whole steps, worked by hand: starts, devices taken in turns, services, sleep, weights, and faults of a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fakes.tiny_scenario import (
    FOLDER,
    LEARNER,
    MODEL,
    PRICES,
    REFERENCE,
    SERVING_S,
    SLEEP_S,
    WAKE_S,
    actor,
    batch_of,
    called,
    fleet_seen,
    on,
    one_step,
    play,
    repeated,
    setup_of,
    slot_setup,
    usage_of,
)
from fakes.views import Evenly, Scripted
from rlhfless.records import Decision, FunctionName, FunctionRole, Work
from rlhfless.scaling.accounting import Phase, summarise
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.policy import (
    Action,
    Event,
    Generated,
    Heartbeat,
    Idle,
    Note,
    Release,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.sim.replay.recorded import steps_ahead
from rlhfless.sim.setup import ServiceShape
from rlhfless.sim.strict import SimulationError


def test_one_step_by_hand() -> None:
    policy = Evenly()
    trace, step = one_step(setup_of(actor(0)), policy, batch_of([(5, [3])]))
    drawn_s = SERVING_S + MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 2)
    scored_s = drawn_s + 0.004  # scoring starts in no time, on the actor's node
    end_s = scored_s + 1.0 + 0.2 + 0.001 * 8 + 0.05  # the learner starts when it is wanted
    assert step.finish_s == pytest.approx([drawn_s], rel=1e-9)
    assert trace.steps[0].end_s == pytest.approx(end_s, rel=1e-9)
    events = [(at_s, event) for at_s, event in policy.seen if not isinstance(event, Heartbeat)]
    assert [event for _, event in events[:-1]] == [StepBegan(), Serving(0), Generated(), Idle(1)]
    assert isinstance(events[-1][1], StepEnded)
    assert [at_s for at_s, _ in events] == pytest.approx([0.0, SERVING_S, drawn_s, scored_s, end_s])
    summary = summarise(trace, PRICES)
    usage = {row.name: row for row in summary.functions}[FunctionName.GENERATION]
    assert usage.cold_device_s == pytest.approx(2.0)  # the node's five seconds are not billed
    assert usage.busy_device_s == pytest.approx(0.3 + drawn_s - SERVING_S)
    assert usage.cost_usd == pytest.approx((end_s - 5.0) * 3.6 / 3600)
    assert summary.steps[0].phases_s[Phase.SCORING] == pytest.approx(0.004)


def test_a_start_ahead_of_time() -> None:
    """The reference is up when it is wanted; the latest request for a time counts, and one for a replica that is up is
    void."""

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Start(1, 6.5), Start(1, 6.0), Start(0, 1.0)) if isinstance(event, StepBegan) else ()

    where = slot_setup(8, start_s=0.7, node=0)
    trace, step = one_step(setup_of(actor(0), services=(on(REFERENCE, where),)), Scripted(answer), batch_of([(5, [3])]))
    end_s = step.end_s + 0.01 + 1.0 + 0.2 + 0.008 + 0.05
    assert trace.steps[0].end_s == pytest.approx(end_s)
    reference = usage_of(trace, FunctionName.REFERENCE)
    assert (reference.cold_device_s, reference.cold_starts) == (pytest.approx(0.7), 1)
    assert reference.provisioned_device_s == pytest.approx(end_s - 6.0)


def test_each_node_but_the_learners_pulls_the_weights_once_and_one_after_the_other() -> None:
    """Two actors on node 0, which is the learner's, two on node 1 and one on node 2: a load takes 0.3 s, a pull 0.4."""
    nodes = (0, 0, 1, 1, 2)
    actors = [on(actor(device), slot_setup(device, node=node)) for device, node in enumerate(nodes)]
    pulled = dataclasses.replace(FOLDER, home="node-0", pull_bytes_per_s=5e8)
    setup = dataclasses.replace(setup_of(*actors), transport=pulled, warm=True, node_s=0.0)
    trace, _ = one_step(setup, Evenly(), batch_of([(5, [200] * len(nodes))]))
    loads = called(trace, Work.LOAD_WEIGHTS)
    assert [call.duration_s for call in sorted(loads, key=lambda call: call.replica)] == pytest.approx(
        [0.3, 0.3, 0.7, 0.7, 1.1]
    )
    assert fleet_seen(setup).load_s == pytest.approx(2 * 0.4 + 0.3)


def test_steps_that_are_drawn_ahead_overlap_and_need_devices_of_their_own() -> None:
    slow = dataclasses.replace(LEARNER, fixed_s=4.0)
    batches = repeated(batch_of([(5, [200])]), 3)
    ends = {}
    for ahead in (0, 1, 2):
        policy = Evenly()
        trace, _ = play(setup_of(actor(0), learner=slow, schedule=steps_ahead(ahead)), batches, policy)
        ends[ahead] = [record.end_s for record in trace.steps]
        times = [at_s for at_s, _ in policy.seen]
        assert times == sorted(times)
    generate_s = MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 199)
    assert ends[1][0] == pytest.approx(ends[0][0])
    # The learner is the bottleneck: it goes from one step to the next without a pause.
    assert generate_s < 4.0
    assert np.diff(ends[1]) == pytest.approx([4.0 + 0.205 + 0.05] * 2)
    assert np.diff(ends[0]) == pytest.approx([0.3 + generate_s + 0.004 + 4.0 + 0.205 + 0.05] * 2)
    assert ends[2] == pytest.approx(ends[1]), "drawn further ahead, the learner has no more work"
    with pytest.raises(ValueError, match="overlaps generation and learning"):
        setup_of(actor(0), learner=on(LEARNER, slot_setup(0)), schedule=steps_ahead(1))


def test_the_next_step_is_drawn_though_the_last_one_was_looked_at_further_ahead() -> None:
    """Nothing happens between the end of the first step's generation and 20 s, by when the second one is over."""

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Start(2, 20.0),) if isinstance(event, StepBegan) and view.step == 1 else ()

    rarely = setup_of(actor(0), heartbeat_s=100.0)
    trace, _ = play(rarely, repeated(batch_of([(5, [3])]), 2), Scripted(answer))
    drawn_s = 0.3 + MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 2)
    second = trace.steps[1]
    assert second.end_s - second.start_s == pytest.approx(drawn_s + 0.004 + 0.2 + 0.008 + 0.05, rel=1e-9)


@pytest.mark.parametrize("fewest", [0, 1])
def test_a_run_that_is_under_way_begins_warm_and_keeps_its_fewest_actors(fewest: int) -> None:
    """Its fewest actors, by default all, are up without the 2 s of a start; an actor that was released starts again in
    the second step, and the last one of the fewest is not released."""

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(0), Release(1)) if isinstance(event, Generated) else ()

    batch = batch_of([(5, [20]), (5, [20])])
    warm = dataclasses.replace(setup_of(actor(0), actor(1)), node_s=0.0, warm=True, fewest_actors=fewest)
    trace, _ = play(warm, repeated(batch, 2), Scripted(answer))
    first, second = trace.steps
    drawn_s = MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 19)
    assert first.metrics["generation_s"] == pytest.approx((2.0 if fewest else 0.0) + 0.3 + drawn_s)
    assert second.metrics["generation_s"] == pytest.approx(2.0 + 0.3 + drawn_s)
    lives = [{row.incarnation for row in trace.holdings if row.device == f"h100-{device}"} for device in (0, 1)]
    assert [len(each) for each in lives] == ([2, 1] if fewest else [2, 2])
    learner_s = min(row.start_s for row in trace.holdings if row.function == FunctionName.LEARNER)
    assert learner_s == 0.0


def test_decisions_are_in_the_trace() -> None:
    decision = Decision(1, 0.0, "plan", "one actor", {"samples": 1})
    policy = Scripted(lambda at_s, event, view: (Note(decision),) if isinstance(event, StepBegan) else ())
    trace, _ = one_step(setup_of(actor(0)), policy, batch_of([(5, [3])]))
    assert decision in trace.decisions


CRITIC = ServiceShape(
    slot_setup(8, start_s=0.5, node=0),
    FunctionName.CRITIC,
    Work.LOGPROBS,
    0.01,
    0.0,
    update_fixed_s=0.3,
    update_token_s=0.002,
)


def test_a_critic_learns_before_the_learner_by_hand() -> None:
    """On a device of its own: it starts at the first complete group, and stays."""
    setup = setup_of(actor(0), services=(CRITIC,))
    assert setup.roles == (FunctionRole.SAMPLES, FunctionRole.UPDATES, FunctionRole.UPDATES)
    trace, _ = one_step(setup, Evenly(), batch_of([(5, [3])]))
    drawn_s = SERVING_S + MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 2)
    valued_s = drawn_s + 0.5 + 0.01
    updated_s = valued_s + 1.0 + 0.3 + 0.002 * 8  # the learner starts before all updates
    calls = sorted((c for c in trace.invocations if c.function in ("critic", "learner")), key=lambda call: call.start_s)
    assert [(call.function, call.work) for call in calls] == [
        ("critic", Work.LOGPROBS),
        ("critic", Work.LEARN),
        ("learner", Work.LEARN),
        ("learner", Work.PUBLISH),
        ("critic", Work.CHECKPOINT),  # of the last step, in no time
        ("learner", Work.CHECKPOINT),
    ]
    assert [call.end_s for call in calls[:2]] == pytest.approx([valued_s, updated_s], rel=1e-9)
    assert calls[2].start_s == pytest.approx(updated_s, rel=1e-9)
    step = trace.steps[0]
    assert step.metrics["prompt_tokens_computed/critic"] == step.metrics["prompt_tokens_unique/critic"] == 10.0
    assert step.metrics["prompt_tokens_computed/learner"] == 5.0


def test_passes_over_a_batch_by_hand() -> None:
    """The critic passes three times, the learner twice: their time per token, and the prompts that they compute."""
    critic = dataclasses.replace(CRITIC, epochs=3)
    learner = dataclasses.replace(LEARNER, epochs=2, evaluate_token_s=0.004)
    setup = dataclasses.replace(setup_of(actor(0), services=(critic,)), learner=learner)
    trace, _ = one_step(setup, Evenly(), batch_of([(5, [3])]))
    spent_s = {(c.function, c.work): c.duration_s for c in trace.invocations}
    assert spent_s["critic", Work.LEARN] == pytest.approx(0.3 + 3 * 0.002 * 8)
    assert spent_s["learner", Work.LEARN] == pytest.approx(LEARNER.fixed_s + 2 * LEARNER.learn_token_s * 8)
    assert spent_s["learner", Work.EVALUATE] == pytest.approx(0.004 * 8), "once, before the first pass"
    metrics = trace.steps[0].metrics
    assert metrics["prompt_tokens_computed/critic"] == metrics["prompt_tokens_unique/critic"] == (1 + 3) * 5
    assert metrics["prompt_tokens_computed/learner"] == metrics["prompt_tokens_unique/learner"] == 2 * 5


def test_critic_and_learner_take_turns_on_one_device() -> None:
    where = LEARNER.slot_setup
    setup = setup_of(actor(0), services=(on(CRITIC, dataclasses.replace(where, start_s=0.5)),))
    trace, _ = play(setup, repeated(batch_of([(5, [3])]), 2), Evenly())
    calls = called(trace, Work.LOGPROBS) + called(trace, Work.LEARN)
    calls = sorted(calls, key=lambda call: call.start_s)
    assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(calls))
    assert [(call.step, call.function) for call in calls if call.work is Work.LEARN] == [
        (1, "critic"),
        (1, "learner"),
        (2, "critic"),
        (2, "learner"),
    ]
    wakes_s = calls[2].start_s - calls[1].end_s
    assert wakes_s == pytest.approx(SLEEP_S + WAKE_S, rel=1e-6), "the critic falls asleep, and the learner wakes"


def test_a_critic_cannot_be_released() -> None:
    class Releases(Evenly):
        def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
            return [Release(1)] if isinstance(event, Generated) else super().decide(at_s, event, view)

    with pytest.raises(SimulationError, match="slot 1 is released, and its critic keeps the run's state"):
        one_step(setup_of(actor(0), services=(CRITIC,)), Releases(), batch_of([(5, [3])]))
