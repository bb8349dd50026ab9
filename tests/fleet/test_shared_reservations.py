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


# -- engines of fleets

FLEET = dataclasses.replace(CORE, fleet="f1")


async def joined(keeper: ReservationManager, of: Tenant, demand: Demand = FLEET, group: str = "generation-0") -> Any:
    return await keeper.hold(of, group, demand, SOON_S, True)


async def test_runs_of_a_fleet_have_its_devices_together_even_if_others_are_free(two: Holders) -> None:
    keeper = ReservationManager(60)
    first = await joined(keeper, tenant("a", most=3))
    assert await joined(keeper, tenant("b", most=3)) == first
    assert await joined(keeper, tenant("c", most=3)) == first
    other = await joined(keeper, tenant("d", most=3), dataclasses.replace(CORE, fleet="f2"))
    assert other.local_ids != first.local_ids, "another fleet"
    assert await joined(keeper, tenant("e", most=3)) is None, "three runs at most, and no device is free"


async def test_each_engine_of_a_run_joins_that_of_the_same_number(two: Holders) -> None:
    keeper = ReservationManager(60)
    of_a = [await joined(keeper, tenant("a"), group=f"generation-{n}") for n in range(2)]
    assert [await joined(keeper, tenant("b"), group=f"generation-{n}") for n in (1, 0)] == of_a[::-1]


async def test_a_learner_never_joins_the_engine_of_a_fleet(two: Holders) -> None:
    keeper = ReservationManager(60)
    engine = await joined(keeper, tenant("a"))
    learner = await keeper.hold(tenant("b"), "learner-0", CORE, SOON_S, False)
    assert learner is not None
    assert learner.local_ids != engine.local_ids


async def claimed(keeper: ReservationManager, run: str, dead: str = "", wait_s: float = SOON_S) -> Any:
    return await keeper.claim_engine(tenant(run, most=4), "generation-0", f"{run}-generation-0", dead, wait_s)


async def together(keeper: ReservationManager, *runs: str) -> None:
    for run in runs:
        assert await joined(keeper, tenant(run, most=4))


async def test_one_run_starts_an_engine_and_the_others_wait_for_it(two: Holders) -> None:
    keeper = ReservationManager(60)
    await together(keeper, "a", "b")
    first = await claimed(keeper, "a")
    assert (first.starts, first.up, first.before) == (True, False, "")
    waits = await claimed(keeper, "b")
    assert (waits.engine, waits.starts, waits.up) == (first.engine, False, False)
    told = asyncio.create_task(claimed(keeper, "b", wait_s=10))
    await asyncio.sleep(0)
    await keeper.engine_up(tenant("a"), first.engine)
    claim = await told
    assert (claim.engine, claim.starts, claim.up) == (first.engine, False, True)
    assert await keeper.engines(tenant("b")) == {"b-generation-0": ("generation-0", first.engine)}


async def test_a_broken_engine_is_replaced_once(two: Holders) -> None:
    keeper = ReservationManager(60)
    await together(keeper, "a", "b", "c")
    broken = (await claimed(keeper, "a")).engine
    await keeper.engine_up(tenant("a"), broken)
    new = await claimed(keeper, "b", dead=broken)
    assert (new.starts, new.before) == (True, broken)
    late = await claimed(keeper, "c", dead=broken)
    assert (late.engine, late.starts) == (new.engine, False)


async def test_another_run_starts_the_engine_if_the_first_one_leaves_or_dies(
    two: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = ReservationManager(60)
    await together(keeper, "a", "b", "c")
    half = (await claimed(keeper, "a")).engine
    assert await keeper.leave_engine(tenant("a"), "generation-0") == half, "no other run has claimed it"
    taken = await claimed(keeper, "b")
    assert (taken.starts, taken.before) == (True, half)
    monkeypatch.setattr(reservations, "monotonic_s", lambda: 1e9)
    again = await keeper.claim_engine(tenant("c", most=4), "generation-0", "c-generation-0", "", SOON_S)
    assert (again.starts, again.before) == (True, taken.engine), "the lease of the other has ended"


async def test_the_last_run_to_leave_deletes_the_engine(two: Holders) -> None:
    keeper = ReservationManager(60)
    await together(keeper, "a", "b")
    engine = (await claimed(keeper, "a")).engine
    await keeper.engine_up(tenant("a"), engine)
    await claimed(keeper, "b")
    assert await keeper.leave_engine(tenant("a"), "generation-0") == "", "another run has it"
    await keeper.release(tenant("a"), ["generation-0"])
    assert await keeper.leave_engine(tenant("b"), "generation-0") == engine
    new = await claimed(keeper, "b")
    assert (new.starts, new.before) == (True, engine), "it deletes the old one first, if that is still there"
