"""Between its uses a helper is kept, released by the ledger's figures or by the policy, and started ahead of time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from test_generation_stage import until

from rlhfless.fleet.cluster import FleetError
from rlhfless.loop.holds import Keeper
from rlhfless.records import FunctionName
from rlhfless.scaling.holding import HoldFigures
from rlhfless.spec import Hold


class OnePool:
    """A pool whose one replica is started and stopped at once."""

    function = FunctionName.SCORING

    def __init__(self) -> None:
        self.there = True
        self.starts = 0
        self.fails = False

    def replicas(self) -> tuple[str, ...]:
        return ("replica",) if self.there else ()

    serving = replicas

    async def ready(self) -> str:
        if not self.there:
            if self.fails:
                raise FleetError("no room")
            self.there = True
            self.starts += 1
        return "replica"

    async def stop(self, *_: Any) -> None:
        self.there = False


class NoLedger:
    """No gap and no cold start was measured yet: what is there is kept."""

    def hold_figures(self, function: FunctionName) -> HoldFigures:
        return HoldFigures(None, None)

    def price_usd_per_hour(self, pools: Any) -> float:
        return 1.0

    def add_decision(self, decision: Any) -> None: ...


def keeper(hold: Hold = "auto") -> tuple[Keeper, OnePool]:
    pool: Any = OnePool()
    ledger: Any = NoLedger()
    return Keeper(pool, hold, ledger, lambda: [pool]), pool


async def test_the_policy_releases_what_the_ledger_would_keep() -> None:
    scoring, pool = keeper()
    scoring.release()
    scoring.idle(1)  # has nothing to decide any more
    await until(lambda: not pool.there)
    assert await scoring.ready() == "replica"
    assert pool.starts == 1


@pytest.mark.parametrize("hold", ["always", "never"])
async def test_what_the_spec_says_goes_before_the_policy(hold: Hold) -> None:
    scoring, pool = keeper(hold)
    scoring.release()
    await asyncio.sleep(0)
    assert pool.there
    await scoring.close()


async def test_it_is_started_ahead_of_its_next_use() -> None:
    scoring, pool = keeper()
    pool.there = False
    scoring.warm(time.time() + 0.02)
    assert pool.starts == 0
    await until(lambda: pool.there)
    await scoring.close()


async def test_a_start_that_waits_is_called_off_by_a_use() -> None:
    scoring, pool = keeper()
    pool.there = False
    scoring.warm(time.time() + 0.05)
    await scoring.ready()
    await pool.stop()
    await asyncio.sleep(0.1)
    assert not pool.there
    await scoring.close()


async def test_a_start_ahead_of_time_that_fails_is_tried_again_when_it_is_wanted() -> None:
    scoring, pool = keeper()
    pool.there, pool.fails = False, True
    scoring.warm()
    await asyncio.sleep(0.01)
    pool.fails = False
    assert await scoring.ready() == "replica"
