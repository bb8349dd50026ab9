"""The manager of runs that share devices, without Ray: reservations are fakes with the test's devices."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.fleet import reservations
from rlhfless.fleet.reservations import Demand, Held, ReservationManager, StaleReservation, Tenant

CORE = Demand("cpu-core", 1, gpu=False)
SOON_S = 0.05


class Holders:
    """Grants a fixed number of devices; later reservations stay pending."""

    def __init__(self, devices: int) -> None:
        self.free = [str(number) for number in range(devices)]
        self.killed: list[Any] = []

    def made(self, **_: Any) -> Any:
        return lambda _kind: SimpleNamespace(remote=self._holder)

    def _holder(self, _demand: Demand) -> Any:
        return SimpleNamespace(held=SimpleNamespace(remote=self._held(self.free.pop(0) if self.free else None)))

    def _held(self, device: str | None) -> Any:
        async def held() -> Held:
            if device is None:
                await asyncio.sleep(60)
            return Held(f"holder-{device}", "node", "here", (str(device),))

        return held


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Holders:
    """Provide two devices."""
    made = Holders(2)
    monkeypatch.setattr(reservations.ray, "remote", made.made)
    monkeypatch.setattr(reservations.ray, "kill", made.killed.append)
    # A manager ends its process when its lease expires; here that is the test's process.
    monkeypatch.setattr(reservations, "Lease", lambda *_, **__: SimpleNamespace(renew=lambda *_: None))
    return made


def tenant(run: str, attempt: int = 1, lease_s: float = 60.0, most: int = 2) -> Tenant:
    return Tenant(run, attempt, lease_s, most)


async def device_of(keeper: ReservationManager, of: Tenant, group: str, *, room: bool) -> str | None:
    held = await keeper.hold(of, group, CORE, SOON_S, room)
    return None if held is None else held.local_ids[0]


async def seated(keeper: ReservationManager, *runs: str) -> None:
    """Give each run generation and a learner on the two devices."""
    for run in runs:
        for group in ("generation-0", "learner-0"):
            assert await device_of(keeper, tenant(run), group, room=run == runs[0])


async def test_free_devices_first_then_those_with_the_fewest_runs_and_other_functions(two: Holders) -> None:
    keeper = ReservationManager(60)
    assert await device_of(keeper, tenant("a"), "generation-0", room=True) == "0"
    assert await device_of(keeper, tenant("a"), "learner-0", room=True) == "1"
    assert await device_of(keeper, tenant("b"), "learner-0", room=False) == "0", "where the other run generates"
    assert await device_of(keeper, tenant("b"), "generation-0", room=False) == "1"
    assert await device_of(keeper, tenant("b"), "learner-0", room=False) == "0", "idempotent"
    assert await device_of(keeper, tenant("c"), "learner-0", room=False) is None, "two runs on a device at most"


async def test_a_holder_that_pends_gives_way_to_devices_that_another_run_has_got(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a")
    assert await device_of(keeper, tenant("b"), "generation-0", room=True) is None, "its node said that there is room"
    assert await device_of(keeper, tenant("b"), "generation-0", room=False) == "1"
    assert len(two.killed) == 1, "the holder that pended"


async def test_devices_are_given_back_when_the_last_run_leaves_them(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a", "b")
    await keeper.leave(tenant("a"))
    assert two.killed == []
    await keeper.release(tenant("b"), ["learner-0"])
    assert len(two.killed) == 1


async def test_a_turn_passes_on_and_the_owner_is_told_that_it_is_wanted(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a", "b")
    assert await keeper.turn(tenant("a"), ["generation-0"], 0) == []
    assert not await keeper.wanted(tenant("a"), ["generation-0"], SOON_S)
    told = asyncio.create_task(keeper.wanted(tenant("a"), ["generation-0"], 10))
    assert await keeper.turn(tenant("b"), ["learner-0"], SOON_S) == ["a"], "the same device"
    assert await told
    came = asyncio.create_task(keeper.turn(tenant("b"), ["learner-0"], 10))
    await keeper.pass_on(tenant("a"), ["generation-0"])
    assert await came == []


async def test_a_turn_goes_to_the_run_whose_step_is_due_first(two: Holders) -> None:
    keeper = ReservationManager(60)
    three = [dataclasses.replace(tenant(run), most=3, left_s=left_s) for run, left_s in (("a", 1), ("b", 90), ("c", 9))]
    for each in three:
        assert await device_of(keeper, each, "generation-0", room=each is three[0]) == "0"
    assert await keeper.turn(three[0], ["generation-0"], 0) == []
    for each in three[1:]:
        assert await keeper.turn(each, ["generation-0"], 0) == ["a"]
    await keeper.pass_on(three[0], ["generation-0"])
    assert await keeper.turn(three[1], ["generation-0"], 0) == ["c"]


async def test_a_run_that_has_left_takes_no_turn_any_more(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a", "b")
    assert await keeper.turn(tenant("a"), ["generation-0"], 0) == []
    waits = asyncio.create_task(keeper.turn(tenant("b"), ["learner-0"], 10))
    await asyncio.sleep(0)
    await keeper.leave(tenant("b"))
    with pytest.raises(StaleReservation, match="has ended"):
        await waits
    await keeper.pass_on(tenant("a"), ["generation-0"])
    assert await keeper.turn(tenant("a"), ["generation-0"], 0) == []


async def test_a_run_whose_driver_died_keeps_its_turn_until_its_lease_ends(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a", "b")
    assert await keeper.turn(tenant("a", lease_s=0.2), ["generation-0"], 0) == []
    assert await keeper.turn(tenant("b"), ["learner-0"], 0) == ["a"]
    await asyncio.sleep(0.3)
    assert await keeper.turn(tenant("b"), ["learner-0"], 0) == []


async def test_a_new_driver_has_the_turn_of_the_one_before_which_is_refused(two: Holders) -> None:
    keeper = ReservationManager(60)
    await seated(keeper, "a", "b")
    assert await keeper.turn(tenant("a"), ["generation-0"], 0) == []
    assert await keeper.turn(tenant("a", attempt=2), ["generation-0"], 0) == []
    with pytest.raises(StaleReservation, match="attempt 2 has replaced it"):
        await keeper.pass_on(tenant("a"), ["generation-0"])
