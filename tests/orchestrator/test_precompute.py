"""Actors get the prefixes that their prompts share before the samples."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fakes.fleet import FakePool, runner
from fakes.stage import SPEC, Reader, draw, until
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.in_flight_samples import RolloutRequest
from rlhfless.records import ReplicaState, Work
from rlhfless.scaling.engine_speeds import EngineSpeeds, PrefixMoves

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
    reader = Reader(GenerationStage(pool, behind_a_prefix("pqrs"), SPEC, runner(pool)))
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
    reader = Reader(GenerationStage(pool, behind_a_prefix("pqrs"), SPEC, runner(pool)))
    await until(lambda: bool(pool["a"].requests and pool["b"].requests))
    pool["a"].die()
    await until(lambda: len(pool["b"].requests) == 2)
    assert len(pool["b"].precomputed) == 1, "it has the prefix already"
    pool["b"].finish()
    await reader.task


async def test_an_actor_that_joins_gets_them_first() -> None:
    pool = FakePool("a", "b")
    pool["b"].state = ReplicaState.STALE
    stage = GenerationStage(pool, behind_a_prefix("pqrs"), SPEC, runner(pool))
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].requests))
    pool["b"].state = ReplicaState.SERVING
    stage.joined(1)
    await until(lambda: bool(pool["b"].requests))
    assert [requests_before for _, requests_before in pool["b"].precomputed] == [0]
    for actor in pool.actors.values():
        actor.finish()
    await reader.task


@pytest.mark.parametrize("pays", [True, False])
async def test_an_actor_that_joins_gets_their_kv_from_another_where_that_pays(pays: bool) -> None:
    pool = FakePool("a", "b")
    pool["b"].state = ReplicaState.STALE
    moves = Moves(pays)
    stage = GenerationStage(pool, behind_a_prefix("pqrs"), SPEC, runner(pool), moves=moves)
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].requests))
    pool["b"].state = ReplicaState.SERVING
    stage.joined(1)
    await until(lambda: bool(pool["b"].requests))
    asked, *offered = (asked for asked, _ in pool["a"].precomputed)
    assert (asked.prefixes, asked.offer, asked.offers) == ((PREFIX,), False, (None,))
    assert [(other.prefixes, other.offer) for other in offered] == ([((PREFIX,), True)] if pays else [])
    ((taken, _),) = pool["b"].precomputed
    assert taken.offers == (({"from": "a"},) if pays else (None,))
    assert moves.learned == ([len(PREFIX)] if pays else [])
    for actor in pool.actors.values():
        actor.finish()
    await reader.task


class Moves(PrefixMoves):
    """Pays always or never; remembers the tokens of moves."""

    def __init__(self, pays: bool) -> None:
        self.learned: list[int] = []
        self._pays = pays

    def pay(self, kind: str, tokens: int, context_tokens: int) -> bool:
        return self._pays

    def learn(self, tokens: int, seconds: float) -> None:
        self.learned.append(tokens)


def test_the_price_of_a_move_is_learned() -> None:
    """1,000 bytes a token at 0.5 GB/s are 2 us; the prior's engine computes a token in some microseconds."""
    speeds = EngineSpeeds(None, 1, 8)
    compute_s = speeds.model("cpu-core").prefill_s(10_000)
    moves = PrefixMoves(1000 / 0.5e9, speeds)
    assert moves.token_s == pytest.approx(2e-6)
    assert moves.pay("cpu-core", 10_000, 0) == (compute_s > 0.05 + 0.02)
    moves.learn(1000, 0.05 + 0.5)
    moves.learn(3000, 0.05 + 1.5)
    assert moves.token_s == pytest.approx(0.0005)
    assert not moves.pay("cpu-core", 10, 0)
    none = PrefixMoves(math.inf, speeds)
    assert math.isinf(none.token_s)
    assert not none.pay("cpu-core", 10**6, 0)


@pytest.mark.parametrize(
    "request_", [draw("pqrs"), behind_a_prefix("pqrs", Work.HELD_OUT)], ids=["short prompts", "evaluation"]
)
async def test_nothing_is_precomputed(request_: RolloutRequest) -> None:
    pool = FakePool("a")
    reader = Reader(GenerationStage(pool, request_, SPEC, runner(pool)))
    await until(lambda: bool(pool["a"].requests))
    assert pool["a"].precomputed == []
    pool["a"].finish()
    await reader.task
