"""Work goes to actors, moves between them, and every group comes out exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fakes.fake_cluster import FakeFleet, FakePool
from fakes.fake_run import SPEC, Reader, draw, stage_of, until
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import ReplicaState, sample_seed
from rlhfless.scaling.policy import UNASSIGNED, Action, Assign, Event, Lost, Start, StepBegan, StepView


async def test_siblings_go_to_one_actor_with_the_seeds_of_their_names() -> None:
    pool = FakePool("a", "b")
    reader = Reader(stage_of(pool, draw("pqr")))
    await until(lambda: bool(pool["a"].requests and pool["b"].requests))
    assert {key[0] for key in pool["a"].running} == {"p", "r"}
    assert set(pool["b"].running) == {("q", 0), ("q", 1)}
    assert pool["b"].running["q", 1].seed == sample_seed(11, 3, "q", 1)
    pool["b"].finish()
    await until(lambda: reader.names == ["q"])  # a finished group does not wait for the others
    pool["a"].finish()
    await reader.task
    assert sorted(reader.names) == ["p", "q", "r"]
    assert [r.sample_index for r in reader.groups[0].rollouts] == [0, 1]


async def test_who_still_loads_its_weights_gets_its_share_as_soon_as_it_serves() -> None:
    pool = FakePool("a", "b")
    pool["a"].state = pool["b"].state = ReplicaState.STALE
    stage = stage_of(pool, draw("pq"))
    reader = Reader(stage)
    pool["b"].state = ReplicaState.SERVING
    await until(lambda: bool(pool["b"].requests))
    assert pool["a"].requests == []
    pool["a"].state = ReplicaState.SERVING
    stage.joined(0)
    await until(lambda: bool(pool["a"].requests))
    assert ({key[0] for key in pool["a"].running}, {key[0] for key in pool["b"].running}) == ({"p"}, {"q"})
    pool["a"].finish()
    pool["b"].finish()
    await reader.task


async def test_a_drained_actors_samples_go_on_elsewhere_with_their_tokens() -> None:
    pool = FakePool("a", "b")
    stage = stage_of(pool, draw("pq"))
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].running and pool["b"].running))
    await stage.drain(pool["a"])
    await until(lambda: ("p", 0) in pool["b"].running)
    moved = pool["b"].running["p", 0]
    assert moved.prior is not None
    assert len(moved.prior.token_ids) == 5
    assert moved.seed == sample_seed(11, 3, "p", 0)
    pool["b"].finish()
    await reader.task
    assert sorted(reader.names) == ["p", "q"]
    assert all(len(r.token_ids) == 9 for group in reader.groups for r in group.rollouts)


async def test_the_driver_hears_once_that_the_engines_are_at_work() -> None:
    pool, heard = FakePool("a"), []
    stage = stage_of(pool, draw("pq"), at_work=lambda: heard.append("at work"))
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].running))
    assert heard == []
    pool["a"].heartbeat({("p", 0): 4})
    await until(lambda: heard == ["at work"])
    pool["a"].finish()
    await reader.task
    assert heard == ["at work"]


async def test_a_joining_actor_takes_half_of_the_difference() -> None:
    pool = FakePool("a")
    stage = stage_of(pool, draw("pqrs"))
    reader = Reader(stage)
    await until(lambda: len(pool["a"].running) == 8)
    joined = pool.join("b")
    stage.joined(1)
    await until(lambda: len(joined.running) == 4)
    assert {key[0] for key in joined.running} == {"r", "s"}
    pool["a"].finish()
    joined.finish()
    await reader.task
    assert sorted(reader.names) == ["p", "q", "r", "s"]


async def test_a_group_split_by_a_move_comes_out_whole() -> None:
    pool = FakePool("a")
    stage = stage_of(pool, draw("p", samples=4))
    reader = Reader(stage)
    await until(lambda: len(pool["a"].running) == 4)
    joined = pool.join("b")
    stage.joined(1)
    await until(lambda: len(joined.running) == 2)
    pool["a"].finish()
    joined.finish()
    await reader.task
    drawn = [(r.sample_index, r.actor) for r in reader.groups[0].rollouts]
    assert drawn == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


async def test_a_dead_actors_samples_are_drawn_again_by_others() -> None:
    pool = FakePool("a", "b")
    reader = Reader(stage_of(pool, draw("pqr")))
    await until(lambda: len(pool["a"].running) == 4 and bool(pool["b"].running))
    pool["a"].finish("p")
    await until(lambda: reader.names == ["p"])
    pool["a"].die()
    await until(lambda: ("r", 0) in pool["b"].running)
    assert pool["b"].running["r", 0].prior is None
    pool["b"].finish()
    await reader.task
    assert sorted(reader.names) == ["p", "q", "r"]


async def test_without_any_actor_left_the_stage_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool("a")
    reader = Reader(stage_of(pool, draw("p")))
    await until(lambda: bool(pool["a"].running))
    pool["a"].die()
    with pytest.raises(ReplicaLost, match="no generation actor is left for 2 unfinished samples"):
        await reader.task
    assert "policy failed" not in caplog.text  # no policy could have done better


async def test_an_error_of_an_actor_ends_the_stage() -> None:
    pool = FakePool("a")
    reader = Reader(stage_of(pool, draw("p")))
    await until(lambda: bool(pool["a"].running))
    pool["a"].fail(ValueError("bad sample"))
    with pytest.raises(ValueError, match="bad sample"):
        await reader.task


async def test_a_step_that_kills_every_actor_does_not_go_on_for_ever() -> None:
    spec = SPEC.model_copy(update={"recovery": SPEC.recovery.model_copy(update={"per_step": 0})})
    pool = FakePool("a", "b", allocations=2)
    stage = stage_of(pool, draw("p"), spec=spec)
    reader = Reader(stage)
    for coming in "cde":
        await until(lambda: any(actor.running for actor in pool.actors.values() if actor.state.holds_device))
        next(actor for actor in pool.actors.values() if actor.running and actor.state.holds_device).die()
        pool.join(coming)
    with pytest.raises(ReplicaLost, match="3 actors were lost before a single sample ended"):
        await reader.task


class Stubborn:
    """Starts an actor at the first slot, regardless of the fate of the previous one."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (
            (Start(0), Assign(0, np.flatnonzero(view.home == UNASSIGNED)))
            if isinstance(event, StepBegan | Lost)
            else ()
        )


async def test_a_slot_where_no_replica_ever_comes_up_does_not_go_on_for_ever() -> None:
    spec = SPEC.model_copy(update={"recovery": SPEC.recovery.model_copy(update={"per_step": 2})})
    pool = FakePool(allocations=1)
    fleet = FakeFleet(pool)
    stage = stage_of(pool, draw("p"), spec=spec, policy=PolicyRunner(Stubborn(), fleet, lambda _: None))
    reader = Reader(stage)
    for count in range(1, 5):
        await until(lambda count=count: len(fleet.started) == count)
        fleet.starting.clear()
        stage.missed(0)
    lost = "4 actors were lost before a single sample ended: no actor came up at slot 0"
    with pytest.raises(ReplicaLost, match=lost):
        await reader.task


async def test_without_actors_and_weights_the_stage_ends_at_once() -> None:
    pool = FakePool("a", "b")
    gone = ["the learner was lost"]
    reader = Reader(stage_of(pool, draw("pq"), no_weights=lambda: gone[0]))
    await until(lambda: bool(pool["a"].running and pool["b"].running))
    pool["a"].die()
    await until(lambda: ("p", 0) in pool["b"].running)  # an actor that has the weights continues
    pool["b"].die()
    with pytest.raises(ReplicaLost, match=r"none can load the weights: the learner was lost \(b died\)"):
        await reader.task


async def test_what_is_lost_waits_for_who_is_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool("a", "b")
    pool["b"].state = ReplicaState.STALE  # its weights are being loaded
    stage = stage_of(pool, draw("p"))
    reader = Reader(stage)
    await until(lambda: len(pool["a"].running) == 2)
    pool["a"].die()
    await until(lambda: "a died; 2 samples" in caplog.text)
    assert not pool["b"].running
    pool["b"].state = ReplicaState.SERVING
    stage.joined(1)
    await until(lambda: len(pool["b"].running) == 2)
    pool["b"].finish()
    await reader.task
    assert reader.names == ["p"]
    assert "policy failed" not in caplog.text
