"""Whole steps: worked by hand, and what holds under any sequence of moves, releases, sleeps and interruptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import LinearModel
from test_engine import batch_of

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.accounting import Phase, summarise
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.placement import Seat, Slot
from rlhfless.scaling.prices import DevicePrice, PriceBook
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.fleet import Place, Transport, TransportKind
from rlhfless.sim.generation import Generation, Links, SimulationError
from rlhfless.sim.policy import (
    Action,
    Assign,
    Beat,
    Event,
    KeepGoing,
    Lost,
    Move,
    PlaceView,
    Policy,
    Release,
    Serving,
    Start,
)
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.step import LearnerShape, ServiceShape, Setup, Simulation, first_come_first_served

MODEL = LinearModel()
PRICED = PricedModel(MODEL, 8)
SHAPE = EngineShape(max_sequences=8, kv_blocks=60, block_tokens=4, chunk_tokens=None)
PRICES = PriceBook(
    devices=(
        DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=date(2026, 11, 21)),
        DevicePrice(kind="h100", usd_per_hour=3.6, source="test", as_of=date(2026, 11, 21)),
    )
)


def seat(index: int, kind: str = "h100") -> Seat:
    return Seat((Slot(f"{kind}-{index}", kind, index),), 1.0)


def place(index: int, **changes: object) -> Place:
    plain = Place(seat(index), f"node-{index}", SHAPE, PRICED, start_s=2.0, wake_s={"host": 0.5})
    return dataclasses.replace(plain, **changes)


LINKS = Links(beat_s=0.5, move_s=0.01, kv_bytes_per_token=1000, kv_bandwidth_bytes_per_s=1e6)
FOLDER = Transport(TransportKind.FOLDER, 1e9, 0.1, 200_000_000)  # 0.3 s
LEARNER = LearnerShape(seat(9), 1.0, 0.2, 0.0, 0.001, 0.05)
SCORING = ServiceShape(FunctionName.SCORING, Work.SCORE, seat(0, "cpu-core"), 0.0, 0.004, 0.0)


def setup_of(*places: Place, **changes: object) -> Setup:
    plain = Setup(places, (SCORING,), LEARNER, FOLDER, LINKS, "sync", node_s=5.0, seed=0)
    return dataclasses.replace(plain, **changes)


def spread_out(batch: RolloutBatch, places: int) -> dict[int, np.ndarray]:
    return {index: np.flatnonzero(batch.group % places == index) for index in range(places)}


def test_one_step_by_hand() -> None:
    simulation = Simulation(setup_of(place(0)), KeepGoing())
    batch = batch_of([(5, [3])])
    record, generation = simulation.step(batch, spread_out(batch, 1))
    serving_s = 5.0 + 2.0 + 0.3  # node, cold start, weights
    drawn_s = serving_s + MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 2)
    learned_s = drawn_s + 0.004 + 0.2 + 0.001 * 8
    assert generation.progress.table.finish_s == pytest.approx([drawn_s], rel=1e-9)
    assert record.end_s == pytest.approx(learned_s + 0.05, rel=1e-9)
    summary = summarise(simulation.close(PRICES), PRICES)
    usage = {row.name: row for row in summary.functions}[FunctionName.GENERATION]
    assert usage.cold_device_s == pytest.approx(2.0)  # the node's five seconds are not billed
    assert usage.busy_device_s == pytest.approx(0.3 + drawn_s - serving_s)
    assert usage.cost_usd == pytest.approx((record.end_s - 5.0) * 3.6 / 3600)
    assert summary.steps[0].phases_s[Phase.SCORING] == pytest.approx(0.004)


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
        simulation = Simulation(setup_of(place(0), learner=slow, schedule=schedule), KeepGoing())
        ends[schedule] = [simulation.step(batch, spread_out(batch, 1))[0].end_s for batch in batches]
    generate_s = MODEL.prefill_s(5) + decode_s(MODEL, 1, 6, 199)
    assert ends["one_step_off"][0] == pytest.approx(ends["sync"][0])
    # The learner is the bottleneck: it goes from one step to the next without a pause.
    assert generate_s < 4.0
    assert np.diff(ends["one_step_off"]) == pytest.approx([4.0 + 0.205 + 0.05] * 2)
    assert np.diff(ends["sync"]) == pytest.approx([0.3 + generate_s + 0.004 + 4.0 + 0.205 + 0.05] * 2)
    with pytest.raises(ValueError, match="one_step_off"):
        setup_of(place(0), learner=dataclasses.replace(LEARNER, seat=seat(0)), schedule="one_step_off")


def test_services_on_generation_devices_wait_their_turn() -> None:
    batch = batch_of([(5, [3]), (5, [100])])
    reference = ServiceShape(FunctionName.REFERENCE, Work.LOGPROBS, seat(0), 0.0, 0.01, 0.0)
    starts = {}
    for name, shape in (("shared", reference), ("apart", dataclasses.replace(reference, seat=seat(5)))):
        simulation = Simulation(setup_of(place(0), services=(shape,)), KeepGoing())
        _, generation = simulation.step(batch, spread_out(batch, 1))
        call = next(call for call in simulation.ledger.invocations if call.work is Work.LOGPROBS)
        starts[name] = call.start_s, sorted(generation.progress.table.finish_s)
    assert starts["apart"][0] == pytest.approx(starts["apart"][1][0])
    assert starts["shared"][0] == pytest.approx(starts["shared"][1][1])


def test_first_come_first_served_by_hand() -> None:
    spans = first_come_first_served(np.array([0.0, 1.0, 5.0]), np.array([2.0, 1.0, 1.0]))
    assert spans == [(0.0, 3.0), (5.0, 6.0)]


def test_prefill_and_decode_apart() -> None:
    prefill = place(0, shape=dataclasses.replace(SHAPE, prefill_only=True))
    simulation = Simulation(setup_of(prefill, place(1)), KeepGoing())
    batch = batch_of([(10, [4])])
    _, generation = simulation.step(batch, {0: np.array([0])})
    serving_s = 7.3
    handed_s = serving_s + MODEL.prefill_s(10) + 0.01 + 10 * 1000 / 1e6
    assert generation.progress.table.finish_s == pytest.approx([handed_s + decode_s(MODEL, 1, 11, 3)], rel=1e-9)
    assert generation.actor_of.tolist() == [1]


def test_a_plan_that_forgets_is_refused() -> None:
    simulation = Simulation(setup_of(place(0)), KeepGoing())
    with pytest.raises(SimulationError, match="the plan leaves 1 samples without a place, such as 1"):
        simulation.step(batch_of([(5, [3, 3])]), {0: np.array([0])})


class Restless:
    """Moves, releases, wakes and restarts at random."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.asked = 0

    def decide(self, at_s: float, event: Event, places: Mapping[int, PlaceView]) -> Sequence[Action]:
        self.asked += 1
        if isinstance(event, Lost):
            return (Start(event.place), Assign(event.place, event.samples))
        source, target = self.random.integers(len(places), size=2).tolist()
        view = places[source]
        if view.state is None or view.state is ReplicaState.SLEEPING:
            return (Start(source),)
        if isinstance(event, Serving) or source == target or self.asked > 400:
            return ()
        if not len(view.samples):
            idle = view.state is ReplicaState.SERVING
            return (Release(source, [None, "host"][self.random.integers(2)]),) if idle else ()
        if places[target].state in (None, ReplicaState.SLEEPING):
            return (Start(target), Move(source, target, view.samples[:1]))
        return (Move(source, target, self.random.permutation(view.samples)[: 1 + len(view.samples) // 2]),)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Setup, list[RolloutBatch], int]:
    count = draw(st.integers(1, 3))
    spot_mean_s = draw(st.sampled_from([math.inf, 4.0, 20.0]))
    places = [place(i, spot_mean_s=spot_mean_s, slowdown=draw(st.sampled_from([1.0, 2.0]))) for i in range(count)]
    lengths = st.lists(st.integers(1, 120), min_size=1, max_size=4)
    groups = st.lists(st.tuples(st.integers(1, 40), lengths), min_size=1, max_size=5)
    batches = [dataclasses.replace(batch_of(draw(groups)), step=step) for step in range(1, draw(st.integers(2, 4)))]
    schedule = draw(st.sampled_from(["sync", "one_step_off"]))
    seed = draw(st.integers(0, 1000))
    return setup_of(*places, seed=seed, schedule=schedule), batches, seed


def play(setup: Setup, batches: list[RolloutBatch], policy: Policy) -> tuple[Simulation, list[Generation]]:
    simulation = Simulation(setup, policy)
    return simulation, [simulation.step(batch, spread_out(batch, len(setup.places)))[1] for batch in batches]


@given(runs())
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_doubled_or_billed_twice(run: tuple[Setup, list[RolloutBatch], int]) -> None:
    setup, batches, seed = run
    simulation, drawn = play(setup, batches, Restless(seed))
    for batch, generation in zip(batches, drawn, strict=True):
        table = generation.progress.table
        assert table.tokens.tolist() == batch.response_tokens.tolist()
        assert np.isfinite(table.finish_s).all()
        assert (generation.actor_of >= 0).all()
    trace = simulation.close(PRICES)
    summary = summarise(trace, PRICES)  # raises if holdings overlap
    total = summary.total
    held_s = math.fsum(holding.device_s for holding in trace.holdings)
    assert total.provisioned_device_s == pytest.approx(held_s, rel=1e-9)
    assert total.unheld_s == pytest.approx(0.0, abs=1e-6)
    assert total.cost_usd == pytest.approx(PRICES.cost_usd(trace.holdings))
    drawn_tokens = sum(call.output_tokens for call in trace.invocations)
    needed = sum(int(batch.response_tokens.sum()) for batch in batches)
    crashes = any(place.spot_mean_s < math.inf for place in setup.places)
    assert drawn_tokens >= needed if crashes else drawn_tokens == needed


@given(runs())
@settings(max_examples=30, deadline=None)
def test_the_same_seed_gives_the_same_run(run: tuple[Setup, list[RolloutBatch], int]) -> None:
    setup, batches, seed = run
    first, second = (play(setup, batches, Restless(seed))[0].close(PRICES) for _ in range(2))
    assert first == second


@given(runs(), st.floats(1e6, 1e10))
@settings(max_examples=30, deadline=None)
def test_more_bandwidth_never_takes_longer(
    run: tuple[Setup, list[RolloutBatch], int], bandwidth_bytes_per_s: float
) -> None:
    setup, batches, _ = run
    calm = dataclasses.replace(
        setup, places=tuple(dataclasses.replace(place, spot_mean_s=math.inf) for place in setup.places)
    )
    ends = []
    for factor in (1, 3):
        transport = dataclasses.replace(FOLDER, bandwidth_bytes_per_s=factor * bandwidth_bytes_per_s)
        simulation, _ = play(dataclasses.replace(calm, transport=transport), batches, KeepGoing())
        ends.append(simulation.ledger.steps[-1].end_s)
    assert ends[1] <= ends[0]


def test_a_beat_asks_the_policy() -> None:
    seen: list[Event] = []

    class Watching(KeepGoing):
        def decide(self, at_s: float, event: Event, places: Mapping[int, PlaceView]) -> Sequence[Action]:
            seen.append(event)
            return super().decide(at_s, event, places)

    simulation = Simulation(setup_of(place(0)), Watching())
    batch = batch_of([(5, [200])])
    simulation.step(batch, spread_out(batch, 1))
    assert seen.count(Serving(0)) == 1
    assert seen.count(Beat()) >= 13  # seven seconds until it serves, at two beats a second
