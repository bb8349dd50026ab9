"""The engines of a fleet as a run's pool starts and stops them, with the manager's own answers and a fake cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.fleet import reservations, shared_engines
from rlhfless.fleet.handles import HandleLost
from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.reservations import Demand, Held, ReservationManager, Tenant
from rlhfless.fleet.shared_engines import SharedEngines
from rlhfless.functions.calls import Call, FunctionBroken, Reply, StaleCall

GROUP = "generation-0"


class Engines:
    """A cluster: what was deployed and deleted, and who has joined what."""

    lost = False

    def __init__(self) -> None:
        self.up: dict[str, list[str]] = {}
        """Runs that have joined, by engine."""
        self.broken: set[str] = set()
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False

    async def deploy(self, name: str, function: type, arguments: Sequence[Any], node: str, *, stop_s: float) -> Any:
        self.log.append(f"deploy {name}")

    async def wait_running(self, name: str, timeout_s: float) -> None:
        await self.gate.wait()
        if self.fails:
            raise FleetError("it did not start")
        self.up[name] = []

    def handle(self, name: str) -> Any:
        return SimpleNamespace(call=lambda method, *arguments: self._call(name, method, *arguments))

    async def _call(self, name: str, method: str, call: Call, *_: Any) -> Reply[None]:
        if name not in self.up:
            raise HandleLost(name)
        if name in self.broken:
            raise FunctionBroken("the engine is dead")
        if method == "join":
            self.up[name].append(call.run_id)
        if method == "stop":
            if call.run_id not in self.up[name]:
                raise FunctionBroken("not joined")
            self.up[name].remove(call.run_id)
        return Reply("i", None, 0.0, 0.0)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.log.append(f"delete {name}")
            self.up.pop(name, None)


class Devices:
    """The devices of a run; asks a real manager."""

    def __init__(self, manager: ReservationManager, run_id: str, attempt: int = 1) -> None:
        self._manager = manager
        self._tenant = Tenant(run_id, attempt, 60.0, 4)
        self.engines: dict[str, tuple[str, str]] = {}

    async def ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._manager, method)(self._tenant, *arguments)
        except reservations.StaleReservation as error:
            raise StaleCall(str(error)) from error

    def group_at(self, _: Any) -> str:
        return GROUP


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> ReservationManager:
    async def held() -> Held:
        return Held("r", "node", "here", ("0",))

    def made(**_: Any) -> Any:
        return lambda _kind: SimpleNamespace(remote=lambda _: SimpleNamespace(held=SimpleNamespace(remote=held)))

    monkeypatch.setattr(reservations.ray, "remote", made)
    monkeypatch.setattr(reservations.ray, "kill", lambda _: None)
    monkeypatch.setattr(reservations, "Lease", lambda *_, **__: SimpleNamespace(renew=lambda *_: None))
    monkeypatch.setattr(shared_engines, "CLAIM_S", 0.05)
    return ReservationManager(60)


async def run_of(manager: ReservationManager, cluster: Engines, run_id: str, attempt: int = 1) -> SharedEngines:
    devices = Devices(manager, run_id, attempt)
    assert await devices.ask("hold", GROUP, Demand("cpu-core", 1, gpu=False, fleet="f"), 1.0, True)
    devices.engines = await devices.ask("engines")
    return SharedEngines(cluster, devices, Call(run_id, attempt, 0))  # type: ignore[arg-type]


async def started(run: SharedEngines, name: str, timeout_s: float = 5.0) -> None:
    settings = SimpleNamespace(binding=None, run="terms")
    await run.deploy(name, object, [settings], "node", stop_s=1.0)
    await run.wait_running(name, timeout_s)


async def test_the_first_run_starts_the_engine_and_the_second_joins_it(manager: ReservationManager) -> None:
    cluster = Engines()
    a, b = [await run_of(manager, cluster, run_id) for run_id in "ab"]
    cluster.gate.clear()
    starts = [asyncio.create_task(started(run, f"{name}-generation-0")) for run, name in ((a, "a"), (b, "b"))]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in starts)
    cluster.gate.set()
    await asyncio.gather(*starts)
    ((engine, runs),) = cluster.up.items()
    assert sorted(runs) == ["a", "b"]
    assert cluster.log == [f"deploy {engine}"]
    await a.delete(["a-generation-0"])
    assert cluster.up == {engine: ["b"]}
    await b.delete(["b-generation-0", "unknown"])
    assert cluster.log == [f"deploy {engine}", f"delete {engine}"]


async def test_a_broken_engine_is_replaced_once_for_all(manager: ReservationManager) -> None:
    cluster = Engines()
    a, b = [await run_of(manager, cluster, run_id) for run_id in "ab"]
    await started(a, "a-generation-0")
    await started(b, "b-generation-0")
    (old,) = cluster.up
    cluster.broken.add(old)
    for run, name in ((a, "a"), (b, "b")):
        await run.delete([f"{name}-generation-0"])
        await started(run, f"{name}-generation-1")
    ((new, runs),) = cluster.up.items()
    assert new != old
    assert sorted(runs) == ["a", "b"]
    assert sum(entry.startswith("deploy") for entry in cluster.log) == 2


async def test_a_start_that_fails_is_the_starters_fault_and_the_next_run_tries(manager: ReservationManager) -> None:
    cluster = Engines()
    a, b = [await run_of(manager, cluster, run_id) for run_id in "ab"]
    cluster.fails = True
    with pytest.raises(FleetError, match="did not start"):
        await started(a, "a-generation-0")
    await a.delete(["a-generation-0"])
    cluster.fails = False
    await started(b, "b-generation-0")
    assert list(cluster.up.values()) == [["b"]]


async def test_a_run_that_waits_too_long_says_for_what(manager: ReservationManager) -> None:
    cluster = Engines()
    a, b = [await run_of(manager, cluster, run_id) for run_id in "ab"]
    cluster.gate.clear()
    start = asyncio.create_task(started(a, "a-generation-0"))
    await asyncio.sleep(0.05)
    with pytest.raises(FleetError, match="waited 0 s for b-generation-0: fleet-f-"):
        await started(b, "b-generation-0", timeout_s=0.2)
    cluster.gate.set()
    await start


async def test_a_new_attempt_finds_its_engine_and_an_old_one_does_not_leave_it(manager: ReservationManager) -> None:
    cluster = Engines()
    old = await run_of(manager, cluster, "a")
    await started(old, "a-generation-0")
    (engine,) = cluster.up
    new = await run_of(manager, cluster, "a", attempt=2)
    assert await new.handle("a-generation-0").call("renew", Call("a", 2, 0))
    await old.delete(["a-generation-0"])
    assert list(cluster.up) == [engine], "the driver that was believed dead deletes nothing"
    await new.delete(["a-generation-0"])
    assert cluster.up == {}
