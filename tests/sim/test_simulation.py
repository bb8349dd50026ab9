"""Whole steps, worked by hand: starts, devices taken in turns, services, sleep, weights, and faults of a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from naive_engine import LinearModel
from simple_policies import Evenly, InTurns, Scripted
from small_fleet import (
    FOLDER,
    LEARNER,
    LINKS,
    MEMORY,
    MODEL,
    PRICES,
    REFERENCE,
    SCORING,
    SHAPE,
    actor,
    on,
    setup_of,
    site,
)
from test_engine import batch_of

from rlhfless.records import Decision, FunctionName, Invocation, ReplicaState, Work
from rlhfless.scaling.accounting import Phase, Usage, summarise
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.placement import Seat, Slot
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Beat,
    Event,
    Generated,
    Idle,
    Move,
    Note,
    Policy,
    Release,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.sim.fleet import SimulationError
from rlhfless.sim.generation import Generation
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import Setup, TransportKind
from rlhfless.sim.simulation import Simulation
from rlhfless.sim.view import fleet_view
from rlhfless.sim.work import first_come_first_served

SERVING_S = 5.0 + 2.0 + 0.3
"""A node, a cold start, the weights."""


def one_step(setup: Setup, policy: Policy, batch: RolloutBatch) -> tuple[Simulation, Generation]:
    simulation = Simulation(setup, policy, PRICES)
    return simulation, simulation.step(batch)


def called(simulation: Simulation, work: Work) -> list[Invocation]:
    return [call for call in simulation.ledger.invocations if call.work is work]


def usage_of(simulation: Simulation, function: FunctionName) -> Usage:
    return {row.name: row for row in summarise(simulation.close(), PRICES).functions}[function]


def test_one_step_by_hand() -> None:
    policy = Evenly()
    simulation, generation = one_step(setup_of(actor(0)), policy, batch_of([(5, [3])]))
    drawn_s = SERVING_S + MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 2)
    scored_s = drawn_s + 0.004  # scoring starts in no time, on the actor's node
    end_s = scored_s + 1.0 + 0.2 + 0.001 * 8 + 0.05  # the learner starts when it is wanted
    assert generation.progress.table.finish_s == pytest.approx([drawn_s], rel=1e-9)
    assert simulation.ledger.steps[0].end_s == pytest.approx(end_s, rel=1e-9)
    events = [(at_s, event) for at_s, event in policy.seen if not isinstance(event, Beat)]
    assert [event for _, event in events[:-1]] == [StepBegan(), Serving(0), Generated(), Idle(1), Idle(2)]
    assert isinstance(events[-1][1], StepEnded)
    assert [at_s for at_s, _ in events] == pytest.approx([0.0, SERVING_S, drawn_s, scored_s, end_s, end_s])
    summary = summarise(simulation.close(), PRICES)
    usage = {row.name: row for row in summary.functions}[FunctionName.GENERATION]
    assert usage.cold_device_s == pytest.approx(2.0)  # the node's five seconds are not billed
    assert usage.busy_device_s == pytest.approx(0.3 + drawn_s - SERVING_S)
    assert usage.cost_usd == pytest.approx((end_s - 5.0) * 3.6 / 3600)
    assert summary.steps[0].phases_s[Phase.SCORING] == pytest.approx(0.004)


def test_a_start_ahead_of_time() -> None:
    """The learner is up when it is wanted; what was asked for later, or again, is void."""

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Start(2, 6.0), Start(2, 6.5), Start(0, 1.0)) if isinstance(event, StepBegan) else ()

    simulation, generation = one_step(setup_of(actor(0)), Scripted(answer), batch_of([(5, [3])]))
    end_s = generation.end_s + 0.004 + 0.2 + 0.008 + 0.05
    assert simulation.ledger.steps[0].end_s == pytest.approx(end_s)
    learner = usage_of(simulation, FunctionName.LEARNER)
    assert (learner.cold_device_s, learner.cold_starts) == (pytest.approx(1.0), 1)
    assert learner.provisioned_device_s == pytest.approx(end_s - 6.0)


def test_weights_by_transport() -> None:
    http = dataclasses.replace(FOLDER, kind=TransportKind.HTTP)
    assert http.load_s(4) == pytest.approx(0.1 + 4 * 0.2)
    for kind in (TransportKind.FOLDER, TransportKind.NCCL, TransportKind.P2P):
        assert dataclasses.replace(FOLDER, kind=kind).load_s(4) == pytest.approx(0.3)


def test_one_step_off_overlaps_and_needs_devices_of_its_own() -> None:
    slow = dataclasses.replace(LEARNER, fixed_s=4.0)
    batches = [dataclasses.replace(batch_of([(5, [200])]), step=step) for step in (1, 2, 3)]
    ends = {}
    for schedule in ("sync", "one_step_off"):
        policy = Evenly()
        simulation = Simulation(setup_of(actor(0), learner=slow, schedule=schedule), policy, PRICES)
        for batch in batches:
            simulation.step(batch)
        simulation.close()
        ends[schedule] = [record.end_s for record in simulation.ledger.steps]
        times = [at_s for at_s, _ in policy.seen]
        assert times == sorted(times)
    generate_s = MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 199)
    assert ends["one_step_off"][0] == pytest.approx(ends["sync"][0])
    # The learner is the bottleneck: it goes from one step to the next without a pause.
    assert generate_s < 4.0
    assert np.diff(ends["one_step_off"]) == pytest.approx([4.0 + 0.205 + 0.05] * 2)
    assert np.diff(ends["sync"]) == pytest.approx([0.3 + generate_s + 0.004 + 4.0 + 0.205 + 0.05] * 2)
    with pytest.raises(ValueError, match="one_step_off"):
        setup_of(actor(0), learner=on(LEARNER, site(0)), schedule="one_step_off")


def test_a_freed_actor_s_device_serves_while_the_tail_is_drawn() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        free = isinstance(event, Beat) and view.places[0].state is ReplicaState.SERVING
        return (Release(0),) if free and not len(view.samples_at(0)) else ()

    setup = setup_of(actor(0), actor(1), services=(REFERENCE,))
    simulation, generation = one_step(setup, Scripted(answer), batch_of([(5, [3]), (5, [200]), (5, [4])]))
    released_s = next(hold.end_s for hold in simulation.ledger.holdings if hold.state is ReplicaState.SERVING)
    first, last = called(simulation, Work.LOGPROBS)
    assert generation.progress.table.finish_s[2] < released_s < generation.end_s
    # It starts on demand, in the order in which groups became complete.
    assert (first.start_s, first.end_s) == pytest.approx((released_s + 0.7, released_s + 0.7 + 2 * 0.01))
    assert last.start_s == pytest.approx(generation.end_s)


def test_services_wait_for_devices_and_an_endless_wait_is_a_fault() -> None:
    batch = batch_of([(5, [3]), (5, [100])])
    simulation, generation = one_step(setup_of(actor(0), services=(REFERENCE,)), InTurns(), batch)
    assert called(simulation, Work.LOGPROBS)[0].start_s == pytest.approx(generation.end_s + 0.7)
    message = r"place 1 \(reference\) waits for device 'h100-0', which place 0 \(generation\) holds"
    with pytest.raises(SimulationError, match=message):
        one_step(setup_of(actor(0), services=(REFERENCE,)), Evenly(), batch)
    simulation = Simulation(setup_of(actor(0), learner=on(LEARNER, site(0))), Scripted(lambda *_: ()), PRICES)
    with pytest.raises(SimulationError, match=r"place 2 \(learner\) waits for device 'h100-0', which place 0"):
        simulation.step(batch)


def test_generation_that_waits_for_a_device_for_ever_is_a_fault() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(0),) if isinstance(event, Generated) else ()

    simulation, _ = one_step(setup_of(actor(0), learner=on(LEARNER, site(0))), Scripted(answer), batch_of([(5, [3])]))
    with pytest.raises(SimulationError, match=r"place 0 \(generation\) waits .* which place 2 \(learner\) holds"):
        simulation.step(batch_of([(5, [3])]))


def test_a_service_beside_an_actor_does_not_wait() -> None:
    cores = {"seat": Seat((Slot("cpu-core-0", "cpu-core", 0),), 0.5), "beside": True}
    shared = setup_of(actor(0, site=site(0, **cores)), services=(on(SCORING, site(0, start_s=0.7, **cores)),))
    simulation, generation = one_step(shared, Evenly(), batch_of([(5, [3]), (5, [100])]))
    first = called(simulation, Work.SCORE)[0]
    assert first.start_s == pytest.approx(generation.progress.table.finish_s[0] + 0.7)
    whole = {"seat": Seat((Slot("cpu-core-0", "cpu-core", 0),), 0.75), "beside": True}
    with pytest.raises(ValueError, match=r"shares of device 'cpu-core-0' add up to 1\.25; lower them"):
        dataclasses.replace(shared, services=(on(SCORING, site(0, **whole)),))


def test_whoever_sleeps_pays_for_a_device_only_if_nobody_else_does() -> None:
    """The actor sleeps while the learner is awake on its device, and the other way round."""
    setup = setup_of(actor(0), learner=on(LEARNER, site(0, start_s=1.0)))
    batches = [dataclasses.replace(batch_of([(5, [30])]), step=step) for step in (1, 2)]
    bills = {}
    for book in (PRICES, MEMORY):
        simulation = Simulation(setup, InTurns("host"), book)
        for batch in batches:
            simulation.step(batch)
        trace = simulation.close()
        bills[book] = [row for row in trace.holdings if row.device == "h100-0"], trace.steps
    rows, steps = bills[PRICES]
    # The device is held from the node's arrival on, without a gap, and once.
    assert sum(row.device_s for row in rows) == pytest.approx(steps[-1].end_s - 5.0)
    assert PRICES.cost_usd(rows) == pytest.approx((steps[-1].end_s - 5.0) * 3.6 / 3600)
    rows, steps = bills[MEMORY]
    asleep_s = sum(row.device_s for row in rows if row.state is ReplicaState.SLEEPING)
    awake_s = sum(row.device_s for row in rows if row.state is not ReplicaState.SLEEPING)
    assert MEMORY.cost_usd(rows) == pytest.approx((awake_s * 3.6 + asleep_s * 0.36) / 3600)
    held = {row.name: row.provisioned_device_s for row in summarise(trace, MEMORY).functions}
    assert held["generation"] + held["learner"] == pytest.approx(awake_s)  # host memory is no device


def test_waking_takes_its_tier_s_time() -> None:
    ends = {}
    for tier in ("host", "disk", None):
        simulation = Simulation(setup_of(actor(0)), InTurns(tier), PRICES)
        for step in (1, 2):
            simulation.step(dataclasses.replace(batch_of([(5, [30])]), step=step))
        ends[tier] = simulation.ledger.steps[1].end_s - simulation.ledger.steps[0].end_s
    # Actor and learner wait for each other: generation 2.0 or its tier, then scoring, then the learner 1.0 or its tier.
    assert ends["disk"] - ends["host"] == pytest.approx(3 * (1.5 - 0.5))
    assert ends[None] - ends["host"] == pytest.approx(2.0 - 0.5 + 0.0 - 0.5 + 1.0 - 0.5)


def test_moving_with_kv_costs_its_way_and_no_prefill() -> None:
    moved: list[tuple[float, int]] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Beat) and not moved and view.tokens[0] > 10:
            moved.append((at_s, int(view.tokens[0])))
            return (Move(0, 1, np.array([0]), with_kv=True),)
        return ()

    batch = batch_of([(10, [180]), (10, [1])])
    simulation, generation = one_step(setup_of(actor(0), actor(1)), Scripted(answer), batch)
    at_s, seen = moved[0]
    begun_s = SERVING_S + MODEL.prefill_s(10)
    assert begun_s + decode_s(MODEL, 1, 11, seen - 1) <= at_s < begun_s + decode_s(MODEL, 1, 11, seen)
    left_s = begun_s + decode_s(MODEL, 1, 11, seen)  # the iteration under way is finished
    arrived_s = left_s + 0.01 + 0.001 * (10 + seen + 1)
    expected_s = arrived_s + decode_s(MODEL, 1, 10 + seen + 1, 180 - seen - 1)
    assert generation.progress.table.finish_s[0] == pytest.approx(expected_s, rel=1e-9)
    assert sum(call.input_tokens for call in called(simulation, Work.GENERATE)) == 20  # each prompt once
    none = setup_of(actor(0), actor(1), links=dataclasses.replace(LINKS, kv_token_s=float("inf")))
    moved.clear()
    with pytest.raises(SimulationError, match="no connector moves KV from place 0"):
        one_step(none, Scripted(answer), batch)


def test_first_come_first_served_by_hand() -> None:
    """Jobs within 30 ms of each other are one call."""
    spans = first_come_first_served(np.array([0.0, 1.0, 5.0, 6.02]), np.array([2.0, 1.0, 1.0, 1.0]))
    assert spans == [(0.0, 3.0), (5.0, pytest.approx(7.02))]


def test_prefill_and_decode_apart() -> None:
    prefill = actor(0, engine=dataclasses.replace(SHAPE, prefill_only=True))
    _, generation = one_step(setup_of(prefill, actor(1)), Evenly(), batch_of([(10, [4])]))
    handed_s = SERVING_S + MODEL.prefill_s(10) + 0.01 + 11 * 0.001
    assert generation.progress.table.finish_s == pytest.approx([handed_s + decode_s(MODEL, 1, 11, 3)], rel=1e-9)
    assert generation.actor_of.tolist() == [1]
    with pytest.raises(ValueError, match="kv_token_s is infinite"):
        setup_of(prefill, actor(1), links=dataclasses.replace(LINKS, kv_token_s=float("inf")))


def test_decisions_are_in_the_trace() -> None:
    decision = Decision(1, 0.0, "plan", "one actor", {"samples": 1})
    policy = Scripted(lambda at_s, event, view: (Note(decision),) if isinstance(event, StepBegan) else ())
    simulation, _ = one_step(setup_of(actor(0)), policy, batch_of([(5, [3])]))
    assert simulation.close().decisions == (decision,)


def test_what_a_policy_sees() -> None:
    """Tokens as they are drawn, at every beat; the end of a response only once it is there; and nothing to write to."""
    seen: list[tuple[float, int, bool, bool]] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Beat | Generated):
            seen.append((at_s, int(view.tokens[0]), bool(view.finished[0]), bool(view.truncated[0])))
            running = view.places[0].running
            assert running == (view.tokens[0] > 0 and not view.finished[0])
        assert not view.tokens.flags.writeable
        return ()

    batch = dataclasses.replace(batch_of([(5, [200])]), truncated=np.array([True]))
    _, generation = one_step(setup_of(actor(0)), Scripted(answer), batch)
    begun_s = SERVING_S + MODEL.prefill_s(5)
    for at_s, tokens, finished, truncated in seen[:-1]:
        assert not finished
        assert not truncated
        drawn = [k for k in range(200) if begun_s + decode_s(MODEL, 1, 6, k) <= at_s]
        assert tokens == len(drawn)
    assert seen[-1] == (generation.end_s, 200, True, True)
    assert len(seen) > 10
    assert all(at_s == pytest.approx(0.5 * (i + 1)) for i, (at_s, *_) in enumerate(seen[:-1]))


def test_rooms_as_a_policy_sees_them() -> None:
    eight = Seat(tuple(Slot(f"h100-{i}", "h100", i) for i in range(8)), 1.0)
    setup = setup_of(actor(0), actor(1), learner=on(LEARNER, site(0, seat=eight)))
    view = fleet_view(setup, MEMORY)
    assert view.generation() == (0, 1)
    assert [room.function for room in view.rooms[2:]] == [FunctionName.SCORING, FunctionName.LEARNER]
    assert (view.load_s, view.move_s, view.beat_s, view.max_tokens) == (pytest.approx(0.3), 0.01, 0.5, 200)
    first, learner = view.rooms[0], view.rooms[3]
    assert (first.start_s, first.wake_s["disk"], first.usd_per_s) == (2.0, 1.5, pytest.approx(0.001))
    assert first.engine.kv_capacity_tokens == 240
    assert isinstance(first.engine.model, LinearModel)
    assert learner.devices == tuple(f"h100-{i}" for i in range(8))
    assert learner.usd_per_s == pytest.approx(0.008)
    assert learner.resident_usd_per_s["host"] == pytest.approx(0.0008)
    assert fleet_view(setup, PRICES).rooms[3].resident_usd_per_s["host"] == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Start(0), r"place 0 \(generation\) is serving already"),
        (Start(7), "there is no place 7; the fleet has the places 0 to 3"),
        (Release(3), r"place 3 \(learner\) has no replica to Release"),
        (Release(0), "place 0 is released with 1 samples; Move them first"),
        (Release(1, "bed"), r"place 1 \(generation\) has no sleep tier 'bed'; it has \['disk', 'host'\]"),
        (Assign(1, np.array([0])), "sample 0, given to place 1, has ended or has a place; Move it"),
        (Move(0, 3, np.array([0])), "place 3 draws no samples; generation has the places 0 to 1"),
        (Move(0, 1, np.array([0, 0])), "names a sample twice"),
    ],
)
def test_what_cannot_be_done_is_a_fault_of_the_policy(action: Action, reason: str) -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        both = all(place.state is ReplicaState.SERVING for place in view.places[:2])
        return (action,) if both and len(view.samples_at(0)) and not len(view.samples_at(1)) else ()

    with pytest.raises(SimulationError, match=reason):
        one_step(setup_of(actor(0), actor(1)), Scripted(answer), batch_of([(5, [150]), (5, [1])]))


def test_samples_without_a_place_or_an_actor_are_faults() -> None:
    class Idler:
        def __init__(self, *answer: Action) -> None:
            self.answer = answer

        def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
            return self.answer if isinstance(event, StepBegan) else ()

    batch = batch_of([(5, [3, 3])])
    with pytest.raises(SimulationError, match="leaves 1 samples without a place, such as 1"):
        one_step(setup_of(actor(0)), Idler(Start(0), Assign(0, np.array([0]))), batch)
    with pytest.raises(SimulationError, match="2 samples are left, and no actor serves or will"):
        one_step(setup_of(actor(0)), Idler(Assign(0, np.array([0, 1]))), batch)
    with pytest.raises(ValueError, match=r"a response of 201 tokens, above max_tokens \(200\)"):
        one_step(setup_of(actor(0)), Evenly(), batch_of([(5, [201])]))
