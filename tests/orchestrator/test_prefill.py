"""Actors that prefill prompts for others: assignment of prompts, and number of actors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fake_cluster import CALL, FakeCluster, pool_of
from fakes.fake_run import until
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.generation.messages import PrecomputeRequest, SampleItem
from rlhfless.orchestrator.prompt_kv import Offers, PrefillActors
from rlhfless.records import FunctionName, WeightVersion
from rlhfless.scaling.assignment import PIECES, pieces
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.latency.fitted import EngineSpeeds, LinearEngine

V2 = WeightVersion("run", 1, 2, "d")
LONG, OTHER = tuple(range(640)), tuple(range(1000, 1640))


class Actors:
    """Real replicas of a pool, whose answers wait for the test."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *names: str, start_s: float = 1e9, fewest: int = 1, slots: int = 3
    ) -> None:
        bounds = Bounds(fewest, "min_actors")
        self.cluster = FakeCluster()
        self.pool = pool_of(self.cluster, *names, slots=slots, bounds=bounds, function=FunctionName.PREFILL)
        self.asked: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.answers: dict[str, asyncio.Future[Offers]] = {}
        monkeypatch.setattr(Replica, "call", self._call)
        speeds = EngineSpeeds(None, 1, 8)
        monkeypatch.setattr(speeds, "model", lambda _: LinearEngine(0.0, 0.0, 0.0, 0.001, 0.0))
        self.prefill = PrefillActors(self.pool, speeds, lambda: start_s, limit_s=60.0)
        for name in names:
            self.load(name)

    def load(self, name: str) -> None:
        self.pool[name].ask(V2)
        self.pool[name].mark_loaded(V2)
        self.pool.notify_joined(self.pool[name])

    async def _call(self, method: str, call: Any, request: PrecomputeRequest, **_: Any) -> Offers:
        assert (method, request.offer, request.version) == ("precompute", True, V2.label)
        self.asked.append((request.actor, request.prefixes))
        self.answers[request.actor] = asyncio.get_running_loop().create_future()
        return await self.answers[request.actor]

    async def ask(self, *prompts: tuple[int, ...]) -> Offers:
        async with self.prefill.offers(CALL, prompts, V2.label) as offers:
            return offers


async def test_prompts_go_to_the_shortest_queue_and_to_the_actor_that_has_their_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = Actors(monkeypatch, "a", "b", fewest=2)
    first = asyncio.create_task(actors.ask(LONG))
    await until(lambda: len(actors.asked) == 1)
    second = asyncio.create_task(actors.ask(OTHER))
    await until(lambda: len(actors.asked) == 2)
    assert [name for name, _ in actors.asked] == ["a", "b"]
    actors.answers["a"].set_result(({"of": "a"},))
    actors.answers["b"].set_result(({"of": "b"},))
    assert await first == ({"of": "a"},)
    assert await second == ({"of": "b"},)
    # Both queues are empty, and b has all of the prompt's blocks but the last.
    third = asyncio.create_task(actors.ask((*OTHER, 7)))
    await until(lambda: len(actors.asked) == 3)
    assert actors.asked[-1][0] == "b"
    actors.answers["b"].set_result(({"of": "b"},))
    await third


@pytest.mark.parametrize("fault", [ReplicaLost("a died"), CallTimeout("waited 60 s for prompts")])
async def test_another_actor_computes_what_a_lost_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    actors = Actors(monkeypatch, "a", "b")
    asked = asyncio.create_task(actors.ask(LONG))
    await until(lambda: len(actors.asked) == 1)
    actors.answers["a"].set_exception(fault)
    await until(lambda: len(actors.asked) == 2)
    assert [name for name, _ in actors.asked] == ["a", "b"]
    actors.answers["b"].set_result(({"of": "b"},))
    assert await asked == ({"of": "b"},)


async def test_a_lost_actor_is_replaced_and_the_prompts_are_left_to_those_that_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = Actors(monkeypatch, "a")
    asked = asyncio.create_task(actors.ask(LONG))
    await until(lambda: len(actors.asked) == 1)
    actors.pool["a"].give_up("it died")
    actors.answers["a"].set_exception(ReplicaLost("a died"))
    assert await asked == ()
    await until(lambda: actors.cluster.begun == [0])


async def test_an_actor_that_loads_its_weights_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, "a")
    actors.pool["a"].ask(WeightVersion("run", 1, 1, "d"))
    asked = asyncio.create_task(actors.ask(LONG))
    await asyncio.sleep(0.01)
    assert not actors.asked
    actors.load("a")
    await until(lambda: len(actors.asked) == 1)
    actors.answers["a"].set_result(({"of": "a"},))
    assert await asked == ({"of": "a"},)


async def test_actors_start_when_the_wait_is_longer_than_a_start_and_leave_when_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine takes 1 ms per token. The first prompt waits 0.64 s, less than the start of 0.7 s, and both wait 1.28
    s; with two actors the wait is 0.64 s."""
    actors = Actors(monkeypatch, "a", start_s=0.7)
    asked = [asyncio.create_task(actors.ask(prompt)) for prompt in (LONG, OTHER)]
    await until(lambda: len(actors.asked) == 2 and actors.cluster.begun == [1])
    assert actors.pool.expects(1)
    assert not actors.pool.expects(2)
    actors.answers["a"].set_result(({"of": "a"},))
    await asked[1]
    assert actors.pool.expects(1), "a prompt waits"
    asked[0].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: not actors.pool.expects(1))
    assert actors.pool.expects(0)


async def test_without_an_actor_those_that_draw_compute_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, fewest=0)
    assert await actors.ask(LONG) == ()
    assert not actors.cluster.begun, "a start would take longer than to compute them"


async def test_an_actor_that_leaves_computes_what_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, "a", "b")
    asked = asyncio.create_task(actors.ask(LONG))
    await until(lambda: len(actors.asked) == 1)
    draining = asyncio.create_task(actors.prefill.drain(actors.pool["a"]))
    await asyncio.sleep(0.01)
    assert not draining.done()
    actors.answers["a"].set_result(({"of": "a"},))
    await draining
    await asked


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3)), min_size=1, max_size=40),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_pieces_have_every_sample_once_and_keep_a_prompt_together(
    prompts: list[tuple[int, int]], most_tokens: int, random: Any
) -> None:
    items = [
        SampleItem(str(number), sample, (number,) * tokens, seed=0)
        for number, (tokens, samples) in enumerate(prompts)
        for sample in range(samples)
    ]
    random.shuffle(items)
    texts = [item.prompt_token_ids for item in items]
    parts = pieces(texts, list(map(len, texts)), most_tokens)
    assert sorted(number for part in parts for number in part) == list(range(len(items)))
    of_part = [{items[number].prompt_token_ids for number in part} for part in parts]
    assert sum(map(len, of_part)) == len(prompts)
    limit = min(most_tokens, -(-sum(tokens for tokens, _ in prompts) // PIECES))
    assert all(len(each) == 1 or sum(map(len, each)) <= limit for each in of_part)
