"""A helper that a policy releases just before a call is started again for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from fakes.fake_cluster import CALL, FakeCluster, pool_of
from fakes.fake_run import until
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.function_specs import Bounds
from rlhfless.spec import TimeoutsSpec


async def test_a_helper_released_while_its_call_waits_for_a_turn_is_started_again() -> None:
    pool = pool_of(FakeCluster(gated=False), "scoring", slots=1, bounds=Bounds(0), function=FunctionName.SCORING)
    entered, free = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def turn(_: Any) -> Any:
        entered.set()
        await free.wait()
        yield

    pool.turn = turn
    run: Any = SimpleNamespace(spec=SimpleNamespace(timeouts=TimeoutsSpec()), trainers=SimpleNamespace(pools=()))
    serving = asyncio.create_task(BaseRun.serve(run, pool, Work.SCORE, "score", CALL, ()))
    await entered.wait()
    assert pool.release(0)
    await until(lambda: not pool.replicas())
    free.set()
    await serving
    (replica,) = pool.replicas()
    assert replica.name != "scoring"
    assert replica.state is ReplicaState.SERVING
