"""Rollouts of one version run together; rollouts of another version wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fakes.fake_run import weights_of
from rlhfless.orchestrator.weight_sync import VersionGate
from rlhfless.records import PublishedWeights


class Draws:
    """Rollouts that end when the test says so."""

    def __init__(self, *, in_flight: bool = False) -> None:
        self.versions = VersionGate(in_flight=in_flight)
        self.versions.newest = weights_of(0)
        self.under_way: dict[str, int] = {}
        """By name: the step of the version with which it generates."""
        self.given: dict[str, PublishedWeights] = {}
        self._over: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, oldest: int = 0, apart: PublishedWeights | None = None) -> None:
        self._over[name] = asyncio.Event()
        self._task = asyncio.create_task(self._draw(name, oldest, apart))
        await settle()

    async def _draw(self, name: str, oldest: int, apart: PublishedWeights | None) -> None:
        async with self.versions.generating(oldest, apart) as published:
            self.given[name] = published
            self.under_way[name] = published.version.step
            await self._over[name].wait()
        del self.under_way[name]

    async def publish(self, step: int) -> None:
        self.versions.newest = weights_of(step)
        await settle()

    async def end(self, name: str) -> None:
        self._over[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_draws_of_one_version_go_together_and_another_one_waits_for_them() -> None:
    draws = Draws()
    await draws.begin("a")
    await draws.begin("b")
    await draws.publish(1)
    await draws.begin("c")
    assert draws.under_way == {"a": 0, "b": 0}
    await draws.end("a")
    assert draws.under_way == {"b": 0}
    await draws.publish(2)
    await draws.end("b")
    assert draws.under_way == {"c": 2}, "the newest when the wait is over"


async def test_those_that_come_later_do_not_overtake_the_one_that_waits() -> None:
    draws = Draws()
    await draws.begin("a")
    await draws.publish(1)
    await draws.begin("evaluation")
    await draws.publish(0)  # a new learner starts with the initial weights again
    await draws.begin("b")
    assert draws.under_way == {"a": 0, "evaluation": 0, "b": 0}
    await draws.publish(1)
    await draws.begin("c")
    await draws.begin("d")
    for name in ("a", "evaluation", "b"):
        await draws.end(name)
    assert draws.under_way == {"c": 1, "d": 1}


async def test_a_draw_waits_beside_the_others_while_weights_are_too_old_for_it() -> None:
    draws = Draws()
    await draws.publish(2)
    await draws.begin("later", oldest=5)
    await draws.begin("now", oldest=2)
    assert draws.under_way == {"now": 2}
    await draws.publish(4)
    await draws.begin("next", oldest=4)
    await draws.end("now")
    assert draws.under_way == {"next": 4}
    await draws.end("next")
    await draws.publish(5)
    assert draws.under_way == {"later": 5}


async def test_one_that_is_called_off_while_it_waits_is_not_waited_for() -> None:
    draws = Draws()
    await draws.begin("a")
    await draws.publish(1)
    await draws.begin("b")
    draws._task.cancel()
    await draws.begin("c")
    await draws.end("a")
    assert draws.under_way == {"c": 1}


async def test_draws_of_engines_that_load_in_flight_do_not_wait_for_each_other() -> None:
    draws = Draws(in_flight=True)
    await draws.begin("a")
    await draws.publish(1)
    await draws.begin("b")
    assert draws.under_way == {"a": 0, "b": 1}
    newer = asyncio.create_task(draws.versions.newer_than(weights_of(1).version))
    await draws.publish(0)  # a new learner repeats steps
    await draws.publish(1)
    assert not newer.done()
    await draws.publish(2)
    assert (await newer).version.step == 2


@pytest.mark.parametrize("in_flight", [False, True])
async def test_weights_apart_from_the_runs_are_mixed_with_no_others(*, in_flight: bool) -> None:
    draws, average = Draws(in_flight=in_flight), replace(weights_of(0), location="average")
    await draws.begin("a")
    await draws.begin("evaluation", apart=average)
    await draws.begin("b")
    assert draws.under_way == {"a": 0}, "the evaluation waits for what is drawn, and what comes later waits for it"
    await draws.end("a")
    assert draws.under_way == {"evaluation": 0}
    assert draws.given["evaluation"] == average
    await draws.publish(1)
    assert draws.under_way == {"evaluation": 0}
    await draws.end("evaluation")
    assert draws.under_way == {"b": 1}
    assert draws.given["b"] == weights_of(1)
