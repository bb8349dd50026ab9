"""What a policy is shown of a live fleet: seats, prices, measured times; and what it may do there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_fleet import FakeActor, FakePool

from rlhfless.functions.base import Call, ReplicaInfo
from rlhfless.functions.generation.messages import SampleItem
from rlhfless.loop.actors import Actors
from rlhfless.loop.board import Board
from rlhfless.loop.ledger import Ledger
from rlhfless.loop.rooms import LiveFleet
from rlhfless.loop.speeds import EngineSpeeds
from rlhfless.loop.steering import PolicyFault
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.latency.startup import START_S
from rlhfless.scaling.placement import CPU_KIND, Seat, Slot
from rlhfless.scaling.prices import PriceBook
from rlhfless.spec import RunSpec

PRICES = PriceBook.model_validate(
    {"devices": [{"kind": CPU_KIND, "usd_per_hour": 36.0, "source": "test", "as_of": "2026-11-01"}]}
)


class OnePool:
    """A function with one replica, on half of a core."""

    def __init__(self, function: FunctionName, state: ReplicaState | None = None) -> None:
        self.function = function
        self.seats = (Seat((Slot("cpu-1", CPU_KIND, 1),), 0.5),)
        self.replica = None if state is None else SimpleNamespace(state=state)

    def at(self, number: int) -> Any:
        return self.replica


class FakeKeeper:
    def __init__(self, pool: OnePool) -> None:
        self.pool = pool
        self.asked: list[Any] = []

    def release(self) -> None:
        self.asked.append("release")

    def warm(self, at_s: float | None) -> None:
        self.asked.append(("warm", at_s))


class Fleet:
    """A live fleet of two seats for actors, with scoring and a learner."""

    def __init__(self, folder: Path, fewest: int = 1, slots: int = 256) -> None:
        self.spec = RunSpec.model_validate(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p"},
                "rewards": [{"type": "exact_match"}],
                "generation": {"max_tokens": 64, "engine": {"max_sequences": slots}},
                "scaling": {"generation": {"min_actors": fewest, "max_actors": 2}},
            }
        )
        meta = TraceMeta("run", 1, PRICES.snapshot(), {}, {})
        self.folder = folder
        self.ledger = Ledger(TraceWriter(folder, meta, record_tokens=False), PRICES)
        self.pool: Any = FakePool("a", seats=2)
        self.pool.function = FunctionName.GENERATION
        self.pool.replicas = lambda: tuple(self.pool.actors.values())
        self["a"].info = ReplicaInfo("i", 1, "here", kv_capacity_tokens=5000)
        self.scoring = FakeKeeper(OnePool(FunctionName.SCORING, ReplicaState.SERVING))
        keepers: Any = {FunctionName.SCORING: self.scoring}
        learner: Any = OnePool(FunctionName.LEARNER, ReplicaState.SERVING)
        speeds = EngineSpeeds(None, 1, 256)
        self.actors = Actors(self.pool, self.spec)
        self.fleet = LiveFleet(
            self.spec, Call("run", 1, 0), self.actors, keepers, learner, self.ledger, speeds, max_model_len=100
        )

    def __getitem__(self, name: str) -> FakeActor:
        return self.pool[name]


def board() -> Board:
    items = [SampleItem(name, index, (1, 2, 3), seed=0) for name in "pq" for index in range(2)]
    return Board(3, items)


def starting(name: str, function: FunctionName, end_s: float) -> Holding:
    return Holding(function, name, name, "cpu-0", CPU_KIND, 1.0, ReplicaState.STARTING, 0.0, end_s)


def loading(seconds: float) -> Invocation:
    return Invocation(FunctionName.GENERATION, "a", "i", Work.LOAD_WEIGHTS, 1, 50.0, 50.0 + seconds)


def test_rooms_are_seats_with_prices_and_the_times_of_the_ledger(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    first = scene.fleet.view()
    assert [room.function for room in first.rooms] == ["generation", "generation", "scoring", "learner"]
    assert first.rooms[0].start_s == START_S  # nothing was measured yet
    assert first.load_s == 0.0
    for holding in (
        starting("a", FunctionName.GENERATION, 20.0),
        starting("b", FunctionName.GENERATION, 30.0),
        starting("s", FunctionName.SCORING, 4.0),
    ):
        scene.ledger.add_holding(holding)
    for seconds in (0.25, 0.75):
        scene.ledger.add_invocation(loading(seconds))
    view = scene.fleet.view()
    assert [room.start_s for room in view.rooms] == [25.0, 25.0, 4.0, START_S]
    assert [room.usd_per_s for room in view.rooms] == [0.01, 0.01, 0.005, 0.005]
    assert (view.load_s, view.max_tokens, view.beat_s) == (0.5, 64, 0.5)
    assert [room.devices for room in view.rooms] == [("cpu-0",), ("cpu-1",), ("cpu-1",), ("cpu-1",)]
    assert all(room.beside for room in view.rooms)  # shares of a core are held side by side


def test_engines_say_what_they_hold_and_until_then_their_sequences_bound_them(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    engine = scene.fleet.view().rooms[1].engine
    assert engine is not None
    assert (engine.kv_capacity_tokens, engine.max_sequences) == (5000, 256)
    scene["a"].info = ReplicaInfo("i", 1, "here")
    engine = scene.fleet.view().rooms[0].engine
    assert engine is not None
    assert engine.kv_capacity_tokens == 256 * 100


def test_a_fleet_that_never_changes_has_nothing_to_save(tmp_path: Path) -> None:
    assert [room.usd_per_s for room in Fleet(tmp_path, fewest=2).fleet.view().rooms] == [0.0, 0.0, 0.005, 0.005]


def test_places_show_who_is_there_and_how_much_each_has(tmp_path: Path) -> None:
    scene, seen = Fleet(tmp_path), board()
    seen.give([0, 1, 2], 0)
    seen.give([3], 1)
    for number in range(3):
        seen.on[number] = 0
    seen.progressed(0, {("p", 0): 4}, {})
    places = scene.fleet.places(seen)
    assert [place.state for place in places] == [ReplicaState.SERVING, None, ReplicaState.SERVING, ReplicaState.SERVING]
    assert [(place.running, place.waiting) for place in places[:2]] == [(1, 2), (0, 1)]
    assert [scene.fleet.expects(place) for place in range(4)] == [True, False, False, False]


def test_a_helper_is_released_and_warmed_by_its_keeper(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    place = scene.fleet.place_of(FunctionName.SCORING)
    scene.fleet.release(place, None, 3)
    scene.fleet.start(place, 200.0, 3)
    assert scene.scoring.asked == ["release", ("warm", 200.0)]


async def test_the_fewest_actors_stay_and_the_ledger_says_so(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    scene.fleet.release(0, None, 3)
    assert scene["a"].state is ReplicaState.SERVING
    scene.ledger.write([])
    (kept,) = read_trace(scene.folder).decisions
    assert (kept.step, kept.kind, kept.choice) == (3, "keep", "place 0 stays")


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (lambda fleet: fleet.release(0, "host_weights", 3), "no sleep tiers"),
        (lambda fleet: fleet.release(1, None, 3), "place 1 is released, and has no actor"),
        (lambda fleet: fleet.release(3, None, 3), "the learner's, which keeps the run's state"),
        (lambda fleet: fleet.start(0, None, 3), r"place 0 is asked to start, and has an actor \(serving\)"),
    ],
)
def test_what_cannot_be_done_is_a_fault_of_the_policy(tmp_path: Path, asked: Any, fault: str) -> None:
    with pytest.raises(PolicyFault, match=fault):
        asked(Fleet(tmp_path).fleet)
