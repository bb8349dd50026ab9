"""The live loop and the simulator receive the same answers: both refuse the same ones, and each sample ends up at the
same slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fake_run import SPEC, draw
from fakes.tiny_scenario import actor, setup_of
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.functions.generation.messages import Ended
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    EngineLimits,
    Event,
    FleetView,
    Heartbeat,
    Lost,
    Move,
    Release,
    ReplicaSlot,
    SlotView,
    Start,
    StepBegan,
    StepView,
)
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.events import SpotInterrupted
from rlhfless.sim.fleet import SimulationError
from rlhfless.sim.generation import Generation
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import Links, Setup
from rlhfless.sim.simulation import Simulation

PLACES, GROUPS, SIBLINGS = 3, 4, 3
SAMPLES = GROUPS * SIBLINGS
MODEL = LinearEngine(0.01, 0.0001, 0.0, 0.0, 0.0)


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass
class Told:
    """A policy that returns the test's answer and records losses."""

    answer: Sequence[Action] = ()
    lost: list[Lost] = field(default_factory=list)

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        self.lost += [event] if isinstance(event, Lost) else []
        return self.answer


class Slots:
    """A live fleet of three slots in which replicas start at once."""

    def __init__(self) -> None:
        self.up = {0, 1}

    def view(self) -> FleetView:
        engine = EngineLimits(MODEL, 10_000, 64)
        names = [f"h100-{slot}" for slot in range(PLACES)]
        replica_slots = [
            ReplicaSlot(FunctionName.GENERATION, FunctionRole.SAMPLES, "h100", (name,), "n", 1e-3, 1.0, {}, {}, engine)
            for name in names
        ]
        return FleetView(tuple(replica_slots), 0.05, 0.01, float("inf"), 0.5, 100)

    def slots(self, table: InFlightSamples) -> tuple[SlotView, ...]:
        states = [ReplicaState.SERVING if slot in self.up else None for slot in range(PLACES)]
        return tuple(SlotView(state, *table.counts(slot)) for slot, state in enumerate(states))

    def expects(self, slot: int) -> bool:
        return slot in self.up

    def start(self, slot: int, at_s: float | None, step: int) -> None:
        if slot in self.up:
            raise PolicyFault(f"slot {slot} has an actor")
        self.up.add(slot)

    def release(self, slot: int, step: int) -> None:
        if slot not in self.up:
            raise PolicyFault(f"slot {slot} has no actor")
        self.up.discard(slot)


class Live:
    """The live side: the table and the runner, without actors."""

    def __init__(self) -> None:
        self.policy, self.fleet, self.faults = Told(), Slots(), list[Exception]()
        request = draw([f"p{group}" for group in range(GROUPS)], SIBLINGS)
        self.table = InFlightSamples(request, SPEC, PLACES)
        self.runner = PolicyRunner(self.policy, self.fleet, lambda _: None)
        self.runner._count_fault = lambda event, fault: self.faults.append(fault)  # type: ignore[method-assign]

    def ask(self, event: Event, answer: Sequence[Action]) -> Exception | None:
        """Return the fault of an answer; None if it has none."""
        self.faults.clear()
        self.policy.answer = answer
        if isinstance(event, StepBegan):
            self.runner.begin(self.table)
        else:
            self.runner.ask(event, self.table.step)
        return self.faults[0] if self.faults else None

    def end(self, samples: np.ndarray) -> None:
        """Mark these samples as ended."""
        for number in samples.tolist():
            self.table.request_of[number] = 0
            self.table.apply_heartbeat(0, {}, {self.table.items[number].key: Ended(1, truncated=False)})
            del self.table.request_of[number]


class Simulated:
    """The simulated side: a complete simulation whose events the test creates."""

    def __init__(self, lengths: Sequence[int], answer: Sequence[Action]) -> None:
        self.policy = Told(answer)
        self.simulation = Simulation(setup(), self.policy, load_price_book())
        group = np.repeat(np.arange(GROUPS), SIBLINGS)
        names = tuple(f"p{number}" for number in range(GROUPS))
        batch = RolloutBatch(1, names, np.ones(GROUPS, np.int64), group, ints(lengths))
        self.step = self.simulation._begin(batch)

    @property
    def generation(self) -> Generation:
        return self.step.generation

    @property
    def home(self) -> np.ndarray:
        return self.generation.assignment.home

    @property
    def finished(self) -> np.ndarray:
        return self.generation.progress.finished

    @property
    def up(self) -> set[int]:
        return {slot for slot in range(PLACES) if self.simulation.fleet.awake_or_asked(slot)}

    def wait(self) -> None:
        """Advance to the next event, with a policy that returns no actions."""
        self.policy.answer = ()
        if self.step.generated_s is None:
            self.simulation._advance()

    def ask(self, answer: Sequence[Action]) -> SimulationError | None:
        self.policy.answer = answer
        try:
            self.simulation._query([Heartbeat()], self.step)
        except SimulationError as fault:
            return fault
        return None

    def lose(self, slot: int, answer: Sequence[Action]) -> SimulationError | None:
        self.policy.answer = answer
        event = SpotInterrupted(slot, self.simulation.fleet.replicas[slot].number)
        try:
            self.simulation._interrupted(self.simulation.now_s, event)
        except SimulationError as fault:
            return fault
        return None

    def follow(self, home: np.ndarray) -> None:
        """Move samples to the slots to which the live side has split them after a fault."""
        for sample in np.flatnonzero(~self.finished & (self.home != home)).tolist():
            source, target = int(self.home[sample]), int(home[sample])
            action = Assign(target, ints([sample])) if source == UNASSIGNED else Move(source, target, ints([sample]))
            if not self.finished[sample]:  # it may have ended while another sample was moved
                self.simulation._do(action, self.step)


def setup() -> Setup:
    """Return a setup of three actors whose steps take several seconds, without a connector that moves KV."""
    shape = EngineShape(max_sequences=8, kv_blocks=1000, block_tokens=4, chunk_tokens=None)
    actors = [actor(slot, engine=shape, prices=PricedModel(MODEL, 8)) for slot in range(PLACES)]
    return setup_of(*actors, links=Links(0.5, 0.01), node_s=0.0, max_tokens=500)


slots, numbers = st.integers(-1, PLACES + 1), st.integers(-1, SAMPLES)
some = st.lists(numbers, min_size=1, max_size=4).map(ints) | st.lists(numbers, max_size=4, unique=True).map(ints)
actions = st.one_of(
    st.builds(Assign, slots, some),
    st.builds(Move, slots, slots, some),
    st.builds(Start, st.integers(0, PLACES - 1)),
    st.builds(Release, st.integers(0, PLACES - 1)),
)


@dataclass(frozen=True)
class Turn:
    """Some simulator events, followed by a lost actor or elapsed time, and the policy's answer."""

    events: int
    lost: int | None
    answer: list[Action]
    sensible: bool
    """Whether lost samples are assigned to some actor before the rest of the answer."""


turns = st.builds(
    Turn, st.integers(0, 6), st.none() | st.integers(0, PLACES - 1), st.lists(actions, max_size=4), st.booleans()
)
lengths = st.lists(st.integers(1, 400), min_size=SAMPLES, max_size=SAMPLES)


@given(lengths, st.lists(turns, max_size=12))
def test_both_refuse_the_same_and_keep_the_same(lengths: list[int], turns: list[Turn]) -> None:
    first = [Assign(0, np.arange(6)), Assign(1, np.arange(6, SAMPLES))]
    live, simulated = Live(), Simulated(lengths, [Start(0), Start(1), *first])
    assert live.ask(StepBegan(), first) is None
    for turn in turns:
        for _ in range(turn.events):
            simulated.wait()
        if simulated.step.generated_s is not None:
            return
        mirror(live, simulated)
        if not play(live, simulated, turn):
            return


def mirror(live: Live, simulated: Simulated) -> None:
    """Apply the ends of samples in the simulator to the live side."""
    live.end(np.flatnonzero(simulated.finished & ~live.table.assignment.finished))
    np.testing.assert_array_equal(live.table.slot_of, simulated.home)
    assert live.fleet.up == simulated.up


def play(live: Live, simulated: Simulated, turn: Turn) -> bool:
    """Apply one answer on both sides, and return False if no actor is left."""
    ended = int(simulated.finished.sum())
    try:
        refused, fault = answers(live, simulated, turn)
    except ReplicaLost:
        assert not live.fleet.up
        return False
    if simulated.finished.sum() == ended:  # otherwise the fault may concern a sample that ended only in the simulator
        assert (refused is None) == (fault is None), (refused, fault)
        if isinstance(refused, SimulationError) and isinstance(refused.__cause__, PolicyFault):
            assert str(refused) == str(fault)
        kept = ~simulated.finished & np.isin(simulated.home, list(live.fleet.up))
        np.testing.assert_array_equal(live.table.slot_of[kept], simulated.home[kept])
        assert refused is not None or np.array_equal(live.table.slot_of, simulated.home)
    live.fleet.up = simulated.up
    live.end(np.flatnonzero(simulated.finished & ~live.table.assignment.finished))
    simulated.follow(live.table.slot_of)
    live.end(np.flatnonzero(simulated.finished & ~live.table.assignment.finished))
    return bool(live.fleet.up)


def answers(live: Live, simulated: Simulated, turn: Turn) -> tuple[Exception | None, Exception | None]:
    """Return each side's reaction to the answer."""
    slot = turn.lost
    if slot not in simulated.simulation.fleet.replicas or len(live.fleet.up) == 1:
        return simulated.ask(turn.answer), live.ask(Heartbeat(), turn.answer)
    live.fleet.up.discard(slot)
    lost = live.table.lose(slot)
    answer = [Assign(min(live.fleet.up), lost), *turn.answer] if turn.sensible else turn.answer
    refused = simulated.lose(slot, answer)
    # Some may have ended in the simulator, which first completes an iteration.
    assert simulated.policy.lost[-1].samples.tolist() == lost[~simulated.finished[lost]].tolist()
    return refused, live.ask(Lost(slot, lost), answer)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([Assign(3, ints([0]))], "slot 3 generates no samples; generation has the slots 0 to 2"),
        ([Move(0, -1, ints([0]))], "slot -1 generates no samples"),
        ([Assign(1, ints([0]))], "sample 0, given to slot 1, has ended or has a slot; Move it"),
        ([Assign(1, ints([12]))], "there is no sample 12; the step has 12"),
        ([Move(0, 1, ints([-1]))], "there is no sample -1"),
        ([Move(0, 1, ints([2, 2]))], "an action names a sample twice"),
        ([Move(0, 1, ints([7]))], "sample 7 is to move from slot 0, and does not belong there"),
        ([Move(0, 2, ints([0]))], "1 samples are left, and no actor serves or will serve at slot 2"),
        ([Start(2, at_s=1e9), Move(0, 2, ints([0]))], "no actor serves or will serve at slot 2"),
        ([Release(0)], "slot 0 is released with 6 samples; Move them first"),
    ],
)
def test_what_is_refused(answer: list[Action], reason: str) -> None:
    first = [Assign(0, np.arange(6)), Assign(1, np.arange(6, SAMPLES))]
    live, simulated = Live(), Simulated([100] * SAMPLES, [Start(0), Start(1), *first])
    live.ask(StepBegan(), first)
    live.fleet.start = lambda slot, at_s, step: None  # type: ignore[method-assign] # for a later step
    for refused in (simulated.ask(answer), live.ask(Heartbeat(), answer)):
        assert refused is not None
        assert reason in str(refused)


def test_an_ended_sample_stays_out_of_a_move_and_nothing_is_refused() -> None:
    first = [Assign(0, np.arange(6)), Assign(1, np.arange(6, SAMPLES))]
    live, simulated = Live(), Simulated([2, *[400] * (SAMPLES - 1)], [Start(0), Start(1), *first])
    live.ask(StepBegan(), first)
    while not simulated.finished[0]:
        simulated.wait()
    mirror(live, simulated)
    answer = [Move(0, 1, ints([0, 1]))]
    assert simulated.ask(answer) is live.ask(Heartbeat(), answer) is None
    assert live.table.slot_of[:3].tolist() == simulated.home[:3].tolist() == [UNASSIGNED, 1, 0]
