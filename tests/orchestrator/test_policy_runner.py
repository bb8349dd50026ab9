"""A policy's decisions are carried out, and its faults cost nothing but the forecast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fakes.fake_cluster import FakeFleet, FakePool
from fakes.fake_run import Reader, draw, stage_of, until
from rlhfless.functions.generation.messages import Ended
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import Decision, ReplicaState
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Event,
    Generated,
    Heartbeat,
    Lost,
    Move,
    Note,
    Release,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.util.clock import unix_s

pytestmark = pytest.mark.usefixtures("clock")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Scripted:
    """A policy that returns the test's answer for each kind of event, and records the events."""

    def __init__(self, **answers: Callable[[StepView], Sequence[Action]] | Sequence[Action]) -> None:
        self.answers = answers
        self.asked: list[Event] = []
        self.views: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        assert at_s == unix_s()
        self.asked.append(event)
        self.views.append((view.tokens.copy(), view.finished.copy(), view.truncated.copy(), view.home.copy()))
        answer = self.answers.get(type(event).__name__, ())
        return answer(view) if callable(answer) else answer

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.asked]


class Scene:
    """A stage over a fake pool with a scripted policy."""

    def __init__(self, pool: FakePool, names: str, policy: Scripted, samples: int = 2) -> None:
        self.pool = pool
        self.policy = policy
        self.fleet = FakeFleet(pool)
        self.notes: list[Decision] = []
        self.runner = PolicyRunner(policy, self.fleet, self.notes.append)
        self.stage = stage_of(pool, draw(names, samples), policy=self.runner)
        self.reader = Reader(self.stage)

    async def ended(self, *actors: str) -> None:
        for actor in actors:
            self.pool[actor].finish()
        await self.reader.task


async def test_samples_go_where_the_policy_said_and_in_its_order() -> None:
    policy = Scripted(StepBegan=[Assign(1, ints(3, 0)), Assign(0, ints(2, 1))])
    scene = Scene(FakePool("a", "b"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].requests and scene.pool["b"].requests))
    assert [item.key for item in scene.pool["b"].requests[0].items] == [("q", 1), ("p", 0)]
    assert [item.key for item in scene.pool["a"].requests[0].items] == [("q", 0), ("p", 1)]
    await scene.ended("a", "b")
    assert policy.kinds == [StepBegan, Generated]
    assert scene.runner.figures(3) == {"moved_samples": 0.0, "actors_wanted": 2.0, "policy_faults": 0.0}


async def test_samples_wait_for_an_actor_that_was_started_for_them() -> None:
    policy = Scripted(StepBegan=[Start(1), Assign(1, ints(3, 2)), Assign(0, ints(0, 1)), Start(2, at_s=160.0)])
    scene = Scene(FakePool("a"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].requests))
    assert scene.fleet.started == [(1, None, 3), (2, 160.0, 3)]
    scene.pool.join("b")
    scene.stage.joined(1)
    await until(lambda: bool(scene.pool["b"].requests))
    assert [item.key for item in scene.pool["b"].requests[0].items] == [("q", 1), ("q", 0)]
    assert policy.asked[-1] == Serving(1)
    await scene.ended("a", "b")


async def test_an_actor_that_never_came_gives_back_what_waited_for_it() -> None:
    policy = Scripted(
        StepBegan=[Start(1), Assign(1, ints(2, 3)), Assign(0, ints(0, 1))],
        Lost=lambda view: [Assign(0, np.flatnonzero((view.home < 0) & ~view.finished))],
    )
    scene = Scene(FakePool("a"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].requests))
    scene.fleet.starting.clear()
    scene.stage.missed(1)
    await until(lambda: len(scene.pool["a"].running) == 4)
    lost = policy.asked[-1]
    assert isinstance(lost, Lost)
    assert (lost.slot, lost.samples.tolist()) == (1, [2, 3])
    await scene.ended("a")


async def test_moved_samples_go_on_at_the_slot_that_was_named() -> None:
    policy = Scripted(StepBegan=[Assign(0, ints(0, 1, 2, 3))], Heartbeat=[Move(0, 2, ints(1, 3))])
    scene = Scene(FakePool("a", "b", "c"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].running))
    scene.pool["a"].heartbeat(dict.fromkeys(scene.pool["a"].running, 5))
    await until(lambda: len(scene.pool["c"].running) == 2)
    assert set(scene.pool["c"].running) == {("p", 1), ("q", 1)}
    assert all(len(item.prior.token_ids) == 5 for item in scene.pool["c"].running.values() if item.prior)
    assert not scene.pool["b"].requests
    await scene.ended("a", "c")
    assert scene.runner.figures(3)["moved_samples"] == 2.0
    assert scene.runner.figures(3)["replayed_tokens"] == 2.0
    ended = StepEnded(0.0, 1.0)
    for _ in range(2):
        scene.runner.end(ended, 3)
    assert [note.choice for note in scene.notes if note.kind == "replayed"] == ["0 of 2 tokens differ"]
    drawn = {(r.prompt_id, r.sample_index): r.actor for group in scene.reader.groups for r in group.rollouts}
    assert drawn == {("p", 0): "a", ("p", 1): "c", ("q", 0): "a", ("q", 1): "c"}


async def test_a_beat_shows_the_reported_tokens_and_lengths_once_an_interval() -> None:
    policy = Scripted(StepBegan=[Assign(0, ints(0, 1)), Assign(1, ints(2, 3))])
    scene = Scene(FakePool("a", "b"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].running and scene.pool["b"].running))
    scene.pool["a"].heartbeat({("p", 0): 12}, {("p", 1): Ended(30, truncated=True)})
    scene.pool["b"].heartbeat({("q", 0): 7, ("q", 1): 8})
    await until(lambda: scene.stage.samples.progress == {("p", 0): 12, ("q", 0): 7, ("q", 1): 8})
    assert policy.kinds == [StepBegan], "actors report as often as they like"
    await until(lambda: policy.kinds == [StepBegan, Heartbeat])
    tokens, finished, truncated, home = policy.views[1]
    assert tokens.tolist() == [12, 30, 7, 8]
    assert finished.tolist() == truncated.tolist() == [False, True, False, False]
    assert home.tolist() == [0, -1, 1, 1]
    scene.pool["b"].heartbeat({("q", 0): 9})
    await until(lambda: policy.kinds == [StepBegan, Heartbeat, Heartbeat])
    assert policy.views[2][0].tolist() == [12, 30, 9, 8]
    await scene.ended("a", "b")


async def test_a_beat_comes_while_no_actor_works_yet() -> None:
    policy = Scripted(StepBegan=[Start(0), Assign(0, ints(0, 1, 2, 3))])
    scene = Scene(FakePool(), "pq", policy)
    await until(lambda: policy.kinds == [StepBegan, Heartbeat])
    scene.pool.join("a")
    scene.stage.joined(0)
    await until(lambda: bool(scene.pool["a"].running))
    await scene.ended("a")


async def test_what_was_lost_starts_anew_where_the_policy_says() -> None:
    policy = Scripted(
        StepBegan=[Assign(0, ints(0, 1, 2, 3))],
        Lost=lambda view: [Assign(2, np.flatnonzero(view.home < 0))],
    )
    scene = Scene(FakePool("a", "b", "c"), "pq", policy)
    await until(lambda: bool(scene.pool["a"].running))
    scene.pool["a"].heartbeat({("p", 0): 12})
    await until(lambda: Heartbeat in policy.kinds)
    scene.pool["a"].die()
    await until(lambda: len(scene.pool["c"].running) == 4)
    assert policy.views[2][0].tolist() == [0, 0, 0, 0]  # the tokens are lost with the actor
    await scene.ended("c")
    assert sorted(scene.reader.names) == ["p", "q"]


async def test_decisions_are_noted_and_the_planned_time_is_a_metric() -> None:
    plan = Decision(3, 100.0, "plan", "1 actors", {"step_s": 2.5})
    policy = Scripted(StepBegan=[Note(plan), Assign(0, ints(0, 1))], Generated=[Release(1), Start(2, at_s=130.0)])
    scene = Scene(FakePool("a", "b"), "p", policy)
    await until(lambda: bool(scene.pool["a"].running))
    await scene.ended("a")
    assert scene.notes == [plan]
    assert scene.runner.figures(3)["planned_generation_s"] == 2.5
    assert scene.fleet.released == [1]
    assert scene.fleet.started == [(2, 130.0, 3)]


async def test_a_contract_that_cannot_be_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = {"feasible": False, "reason": "no plan ends before 9 s", "nearest": "cheapest within 9 s"}
    late, fine = (Decision(3, 100.0, "plan", "1 actors", {"feasible": True, **more}) for more in (told, {}))
    policy = Scripted(StepBegan=[Note(late), Note(late), Note(fine), Note(late), Assign(0, ints(0, 1))])
    with caplog.at_level(logging.WARNING, "rlhfless.orchestrator.scaler"):
        scene = Scene(FakePool("a"), "p", policy)
        await until(lambda: bool(scene.pool["a"].running))
        await scene.ended("a")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # the message repeats after the contract had been kept in between
    assert "no plan ends before 9 s" in said[0]
    assert "the nearest is kept: cheapest within 9 s" in said[0]


def boom(view: StepView) -> Sequence[Action]:
    raise ZeroDivisionError("no lengths")


@pytest.mark.parametrize(
    "answer",
    [
        boom,
        [],  # omits all samples
        [Assign(0, ints(0, 1))],  # omits some samples
        [Assign(0, ints(0, 1, 2, 3)), Assign(1, ints(2))],  # assigns a sample twice
        [Assign(2, ints(0, 1, 2, 3))],  # a slot without an actor
        [Assign(0, ints(0, 1, 2, 3)), Start(1)],  # a slot with an actor
        [Assign(0, ints(0, 1, 2, 3)), Release(0)],  # with samples
        [Assign(7, ints(0, 1, 2, 3))],  # no such slot
        [Assign(0, ints(0, 1, 2, 9))],  # no such sample
    ],
)
async def test_a_fault_of_the_policy_costs_no_sample(answer: Sequence[Action]) -> None:
    scene = Scene(FakePool("a", "b"), "pq", Scripted(StepBegan=answer))
    await until(lambda: len(scene.pool["a"].running) + len(scene.pool["b"].running) == 4)
    for actor in scene.pool.actors.values():
        actor.finish()
    await scene.reader.task
    assert sorted(scene.reader.names) == ["p", "q"]
    assert scene.runner.figures(3)["policy_faults"] == 1.0


async def test_a_broken_policy_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(FakePool("a", "b"), "pq", Scripted(StepBegan=boom, Heartbeat=boom, Generated=boom))
    with caplog.at_level(logging.ERROR):
        await until(lambda: bool(scene.pool["a"].running and scene.pool["b"].running))
        assert {key[0] for key in scene.pool["a"].running} == {"p"}  # split evenly
        await until(lambda: scene.runner.figures(3)["policy_faults"] == 2.0)
        await scene.ended("a", "b")
    assert scene.runner.figures(3)["policy_faults"] == 3.0
    assert [record.message for record in caplog.records] == [
        "the scaling policy failed at StepBegan; unassigned samples are split evenly, then and whenever it "
        "fails again (metric policy_faults)"
    ]


async def test_a_drained_actor_is_shown_as_such_and_its_samples_as_unassigned() -> None:
    seen: list[ReplicaState | None] = []

    def elsewhere(view: StepView) -> Sequence[Action]:
        seen.append(view.slots[0].state)
        return [Assign(1, np.flatnonzero(view.home < 0))]

    scene = Scene(FakePool("a", "b"), "p", Scripted(StepBegan=[Assign(0, ints(0, 1))], Lost=elsewhere))
    await until(lambda: bool(scene.pool["a"].running))
    await scene.stage.drain(scene.pool["a"])  # returns when the actor has no samples
    assert seen == [ReplicaState.DRAINING]
    assert not scene.pool["a"].running
    await until(lambda: len(scene.pool["b"].running) == 2)
    await scene.ended("b")
