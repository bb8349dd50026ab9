"""A generation actor of several runs, around a fake engine: who may call it, and what happens to the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.functions.base import LeaseTerms
from rlhfless.functions.calls import Call, FunctionBroken, StaleCall
from rlhfless.functions.generation import shared
from rlhfless.functions.generation.engine import EngineDead, Sampled, SampleRequest
from rlhfless.functions.generation.fair_queue import FairQueue
from rlhfless.functions.generation.members import MemberEngine, RunTerms
from rlhfless.functions.generation.shared import SharedGenerationFunction
from rlhfless.records import FinishReason
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightFileError


class Engine:
    """Generates when the test says so."""

    block_tokens, kv_capacity_tokens, usable = 16, 0, True

    def __init__(self) -> None:
        self.asked: dict[str, SampleRequest] = {}
        self.left: list[str] = []
        self.shares: dict[str, float] = {}
        self.killed = False
        self._futures: dict[str, asyncio.Future[Sampled]] = {}

    async def sample(self, request: SampleRequest) -> Sampled:
        self.asked[request.request_id] = request
        future = self._futures[request.request_id] = asyncio.get_running_loop().create_future()
        return await future

    def end(self, name: str, reason: FinishReason = FinishReason.STOP) -> None:
        self._futures[name].set_result(Sampled(name, (1, 2), (0.0, 0.0), reason, (), 0, ""))

    async def abort(self, request_ids: Any) -> None:
        for name in request_ids:
            if name in self._futures and not self._futures[name].done():
                self.end(name, FinishReason.ABORT)

    async def leave(self, run_id: str) -> None:
        self.left.append(run_id)

    def kill(self) -> None:
        self.killed = True


def made(engine: Engine, sequences: int = 2) -> SharedGenerationFunction:
    """Return the actor without Ray: its constructor starts an engine."""
    function = SharedGenerationFunction.__new__(SharedGenerationFunction)
    own: Any = {
        "_unfit": None,
        "_engine": engine,
        "_members": {},
        "_ends_s": {},
        "_lease": SimpleNamespace(renew=lambda _: None),
        "_queue": FairQueue(sequences, 0),
        "incarnation": "i",
        "_now": lambda: None,
    }
    for name, value in own.items():
        setattr(function, name, value)
    return function


def terms(lease_s: float = 60.0) -> RunTerms:
    return RunTerms(store=StoreAddress("file", "x"), probe_tolerance=1e-4, lease=LeaseTerms(lease_s, lease_s))


def call(run_id: str, attempt: int = 1) -> Call:
    return Call(run_id, attempt, 0)


def engine_of(function: SharedGenerationFunction, run_id: str) -> MemberEngine:
    engine: Any = function._members[run_id].engine
    return engine


def request(name: str) -> SampleRequest:
    return SampleRequest(name, (1, 2), seed=1, max_tokens=8, temperature=1.0)


async def test_only_runs_that_have_joined_may_call_and_old_attempts_may_not() -> None:
    function = made(Engine())
    with pytest.raises(FunctionBroken, match="run a has not joined"):
        await function.renew(call("a"))
    await function.join(call("a", 2), terms())
    await function.renew(call("a", 2))
    for stale in (function.join(call("a", 1), terms()), function.renew(call("a", 1)), function.stop(call("a", 1))):
        with pytest.raises(StaleCall):
            await stale


async def test_requests_wait_for_their_turn_and_name_their_run() -> None:
    engine = Engine()
    function = made(engine, sequences=2)
    for run_id in "ab":
        await function.join(call(run_id), terms())
    of_a = [asyncio.create_task(engine_of(function, "a").sample(request(f"a{n}"))) for n in range(3)]
    await asyncio.sleep(0)
    of_b = asyncio.create_task(engine_of(function, "b").sample(request("b0")))
    await asyncio.sleep(0.01)
    assert sorted(engine.asked) == ["a0", "a1"]
    engine.end("a0")
    await asyncio.sleep(0.01)
    assert sorted(engine.asked) == ["a0", "a1", "b0"], "the other run is next"
    assert {name: each.run_id for name, each in engine.asked.items()} == {"a0": "a", "a1": "a", "b0": "b"}
    await engine_of(function, "a").abort(["a1", "a2"])
    ended = await asyncio.gather(*of_a)
    assert [each.finish_reason for each in ended] == [FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT]
    assert ended[2].token_ids == ()
    assert "a2" not in engine.asked, "it never reached the engine"
    engine.end("b0")
    await of_b
    assert [function._queue.counts(run_id) for run_id in "ab"] == [(0, 0), (0, 0)]


async def test_a_cancelled_request_gives_its_place_back() -> None:
    engine = Engine()
    function = made(engine, sequences=1)
    await function.join(call("a"), terms())
    tasks = [asyncio.create_task(engine_of(function, "a").sample(request(f"a{n}"))) for n in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    await asyncio.sleep(0.01)
    assert sorted(engine.asked) == ["a0", "a2"]
    engine.end("a2")
    await tasks[2]
    assert function._queue.counts("a") == (0, 0)


async def test_a_run_that_leaves_or_is_silent_is_dropped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LOOK_S", 0.01)
    engine = Engine()
    function = made(engine)
    engine.shares = {"a": 3.0}
    await function.join(call("a"), terms())
    await function.join(call("silent"), terms(lease_s=0.03))
    assert (await function.stop(call("a"))).metered_s == 3.0
    watch = asyncio.create_task(function._watch())
    await function.join(call("b"), terms())
    await asyncio.sleep(0.15)
    watch.cancel()
    assert sorted(engine.left) == ["a", "silent"]
    assert list(function._members) == ["b"]
    await function.renew(call("b"))


async def test_a_damaged_file_breaks_the_run_and_a_dead_engine_all() -> None:
    engine = Engine()
    function = made(engine)
    with pytest.raises(FunctionBroken, match="torn"), function.engine_faults("a load"):
        raise WeightFileError("torn")
    assert not engine.killed
    with pytest.raises(FunctionBroken, match="gone"), function.engine_faults("a load"):
        raise EngineDead("gone")
    assert engine.killed
    engine.usable = False
    with pytest.raises(FunctionBroken, match="dead"):
        await function.join(call("a"), terms())
