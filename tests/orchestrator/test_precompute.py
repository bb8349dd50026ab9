"""Actors get the prefixes that their prompts share before the samples."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.fake_cluster import FakePool
from fakes.fake_run import Reader, draw, stage_of, until
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.records import ReplicaState, Work

PREFIX = tuple(range(1024))


def behind_a_prefix(names: str, work: Work = Work.GENERATE) -> RolloutRequest:
    request = draw(names)
    prompts = tuple(
        dataclasses.replace(prompt, token_ids=(*PREFIX, 2000 + number)) for number, prompt in enumerate(request.prompts)
    )
    return dataclasses.replace(request, prompts=prompts, work=work)


@pytest.mark.parametrize("slow", [False, True])
async def test_before_the_samples_and_once(slow: bool) -> None:
    pool = FakePool("a", "b")
    for actor in pool.actors.values():
        actor.slow = slow
    reader = Reader(stage_of(pool, behind_a_prefix("pqrs")))
    await until(lambda: bool(pool["a"].requests and pool["b"].requests))
    for actor in pool.actors.values():
        ((asked, requests_before),) = actor.precomputed
        assert (asked.prefixes, asked.version, asked.actor) == ((PREFIX,), "run/1/2/d", actor.name)
        assert requests_before == 0
        actor.finish()
    await reader.task
    assert len(reader.groups) == 4


async def test_an_actor_that_takes_samples_over_gets_them_first() -> None:
    pool = FakePool("a", "b")
    reader = Reader(stage_of(pool, behind_a_prefix("pqrs")))
    await until(lambda: bool(pool["a"].requests and pool["b"].requests))
    pool["a"].die()
    await until(lambda: len(pool["b"].requests) == 2)
    assert len(pool["b"].precomputed) == 1, "it has the prefix already"
    pool["b"].finish()
    await reader.task


async def test_an_actor_that_joins_gets_them_first() -> None:
    pool = FakePool("a", "b")
    pool["b"].state = ReplicaState.STALE
    stage = stage_of(pool, behind_a_prefix("pqrs"))
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].requests))
    pool["b"].state = ReplicaState.SERVING
    stage.joined(1)
    await until(lambda: bool(pool["b"].requests))
    assert [requests_before for _, requests_before in pool["b"].precomputed] == [0]
    for actor in pool.actors.values():
        actor.finish()
    await reader.task


@pytest.mark.parametrize(
    "request_", [draw("pqrs"), behind_a_prefix("pqrs", Work.HELD_OUT)], ids=["short prompts", "evaluation"]
)
async def test_nothing_is_precomputed(request_: RolloutRequest) -> None:
    pool = FakePool("a")
    reader = Reader(stage_of(pool, request_))
    await until(lambda: bool(pool["a"].requests))
    assert pool["a"].precomputed == []
    pool["a"].finish()
    await reader.task
