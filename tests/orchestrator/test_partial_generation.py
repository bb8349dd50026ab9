"""A step that does not wait for all groups: unfinished samples are deferred, and a later step resumes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.builders import drawn
from fakes.fake_cluster import FakePool, rollout
from fakes.fake_run import SPEC, Reader, Scene, draw, stage_of, until, weights_of
from fakes.set_clock import TickingClock, reading
from rlhfless.fleet.replica import CallTimeout, ReplicaLost
from rlhfless.orchestrator.in_flight_samples import Replayed
from rlhfless.orchestrator.rollout_request import RolloutRequest, Selection
from rlhfless.orchestrator.step import rollout as roll_out
from rlhfless.orchestrator.step import train
from rlhfless.records import FinishReason, Rollout, VersionSpan
from rlhfless.records.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    return journal


def request_of(begun: Mapping[str, int], groups: int, must_include: str = "") -> RolloutRequest:
    """Return a request of step 3."""
    return replace(draw("".join(begun)), selection=Selection(groups, frozenset(must_include), begun))


def kept(journal: Journal, step: int) -> list[tuple[str, int, str, int]]:
    return [(*r.key, str(r.finish_reason), len(r.token_ids)) for r in journal.rollouts(step)]


async def test_unfinished_samples_keep_their_tokens_and_go_on_in_a_later_step(journal: Journal) -> None:
    journal.begin_groups(3, ["p", "q", "r"])
    pool = FakePool("a", "b")
    reader = Reader(stage_of(pool, request_of({"p": 3, "q": 3, "r": 3}, 2), journal))
    await until(lambda: len(pool["a"].running) + len(pool["b"].running) == 6)
    for actor in (pool["a"], pool["b"]):
        actor.finish("p", "q")
    await reader.task
    assert sorted(reader.names) == ["p", "q"]
    assert [(group.prompt_id, group.taken) for group in journal.groups(3)] == [("p", 3), ("q", 3), ("r", None)]
    assert kept(journal, 3)[4:] == [("r", 0, "abort", 5), ("r", 1, "abort", 5)]
    assert not pool["a"].running
    assert not pool["b"].running

    later = replace(request_of({"r": 3}, 1, "r"), seed_step=4)
    stage = stage_of(pool, later, journal)
    reader = Reader(stage)
    await until(lambda: len(pool["a"].running) + len(pool["b"].running) == 2)
    items = [*pool["a"].running.values(), *pool["b"].running.values()]
    assert [0 if item.prior is None else len(item.prior.token_ids) for item in items] == [5, 5]
    assert {item.seed for item in items} == {item.seed for item in request_of({"r": 3}, 1).items(later.prompts[0])}
    assert stage.samples.resumed == (2, 10)
    for actor in (pool["a"], pool["b"]):
        actor.finish(tokens=8)
    await reader.task
    assert reader.names == ["r"]
    assert kept(journal, 3)[4:] == [("r", 0, "stop", 8), ("r", 1, "stop", 8)]


async def test_a_group_that_is_due_is_waited_for_and_one_that_is_complete_before_it_is_left(journal: Journal) -> None:
    begun = {"p": 1, "q": 3, "r": 3}
    pool = FakePool("a")
    reader = Reader(stage_of(pool, request_of(begun, 2, must_include="p"), journal))
    await until(lambda: len(pool["a"].running) == 6)
    pool["a"].finish("r")
    pool["a"].finish("q")
    await until(lambda: len(journal.rollouts(3)) == 4)
    assert reader.names == ["r"], "a place is kept for p"
    pool["a"].finish("p")
    await reader.task
    assert reader.names == ["r", "p"]
    assert len(pool["a"].requests) == 1
    again = Reader(stage_of(pool, request_of({"q": 3, "s": 4}, 1), journal))
    await again.task
    assert again.names == ["q"], "what is complete needs no engine"
    assert len(pool["a"].requests) == 1


async def test_samples_of_an_actor_that_dies_as_it_hands_them_back_begin_where_they_were(journal: Journal) -> None:
    pool = FakePool("a")
    request = request_of({"p": 3, "q": 2}, 1)
    (item, _) = request.items(request.prompts[1])
    journal.add(2, [rollout(item, "before", 4, FinishReason.ABORT)])
    reader = Reader(stage_of(pool, request, journal))
    actor = pool["a"]
    await until(lambda: len(actor.running) == 4)

    async def die(*_: object, **__: object) -> None:
        actor.fail(ReplicaLost("it died"))
        raise ReplicaLost("it died")

    actor.call = die  # type: ignore[method-assign]
    actor.finish("p")
    await reader.task
    assert reader.names == ["p"]
    assert kept(journal, 2) == [("q", 0, "abort", 4)]


async def test_all_actors_are_asked_at_once_to_hand_back_their_samples(journal: Journal) -> None:
    """An engine answers at the end of an iteration: one after the other, they would take as many iterations."""
    pool = FakePool("a", "b")
    reader = Reader(stage_of(pool, request_of({"p": 3, "q": 3, "r": 3}, 1), journal))
    await until(lambda: len(pool["a"].running) + len(pool["b"].running) == 6)
    both = asyncio.Barrier(2)

    def waiting(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def abort(*arguments: object, **keywords: object) -> Any:
            await both.wait()
            return await call(*arguments, **keywords)

        return abort

    for name in "ab":
        pool[name].call = waiting(pool[name].call)  # type: ignore[method-assign]
    pool["a"].finish("p")
    pool["b"].finish("p")
    async with asyncio.timeout(10):
        await reader.task
    assert reader.names == ["p"]


async def test_an_actor_that_keeps_samples_after_an_abort_is_named(journal: Journal) -> None:
    pool = FakePool("a")
    spec = SPEC.model_copy(update={"timeouts": SPEC.timeouts.model_copy(update={"drain_s": 5.0})})
    request = request_of({"p": 3, "q": 3}, 1)
    stage = stage_of(pool, request, journal, spec=spec)
    reader = Reader(stage)
    await until(lambda: len(pool["a"].running) == 4)

    async def ignore(*_: object, **__: object) -> None: ...

    pool["a"].call = ignore  # type: ignore[method-assign]
    pool["a"].finish("p")
    with reading(TickingClock()), pytest.raises(CallTimeout, match=r"a kept samples for longer than timeouts\.drain_s"):
        await reader.task


def test_engines_are_compared_where_both_drew_with_the_same_weights() -> None:
    def sample(tokens: Sequence[int], *spans: VersionSpan) -> Rollout:
        return drawn("p", 0, tokens, spans=spans)

    replayed = Replayed()
    replayed.add(
        sample([1, 2], VersionSpan("v1", 0, 2)), sample([1, 9, 9], VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3))
    )
    assert replayed.figures() == {}
    replayed.add(sample([1, 2], VersionSpan("v1", 0, 2)), sample([1, 9, 9], VersionSpan("v1", 0, 3)))
    assert (replayed.tokens, replayed.differ) == (1, 1)


async def test_a_run_goes_on_with_what_its_steps_have_left(tmp_path: Path) -> None:
    """The whole loop: p is complete in step 1; q resumes in step 2 together with r, and the last step waits for it."""
    scene = Scene(tmp_path, schedule={"type": "partial", "ahead": 1}, steps=3)
    scene.learner.gate.set()
    actor, metrics = scene.actors["a"], []
    for step, (running, finished) in enumerate([("pq", "p"), ("qr", "r"), ("q", "q")], 1):
        context = scene.run.begin(step)
        drawing = asyncio.create_task(roll_out(scene.run, context))
        await until(lambda running=running: {key[0] for key in actor.running} == set(running))  # type: ignore[misc]
        actor.finish(finished, tokens=8)
        experience = await drawing
        assert [group.prompt.prompt_id for group in experience.groups] == [finished]
        assert not actor.running
        record = await train(scene.run, context, experience)
        metrics.append([record.metrics[name] for name in ("deferred_groups", "resumed_samples", "resumed_tokens")])
        assert scene.run.published == weights_of(step)
    assert metrics == [[1, 0, 0], [1, 2, 10], [0, 2, 10]]
    scene.journal.forget(3)
    assert [scene.journal.rollouts(step) for step in (1, 2, 3)] == [[], [], []]
    assert scene.journal.groups(3) == []
