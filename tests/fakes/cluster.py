"""A cluster without Ray: replicas come up, load weights and stop when the test lets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica
from rlhfless.fleet.replicas import Blueprint
from rlhfless.functions.base import Call, CallUsage, ReplicaInfo, Reply
from rlhfless.functions.generation.deployment import Loaded, LoadProof
from rlhfless.records import FunctionName, ReplicaState, SleepTier, Slept, WeightVersion
from rlhfless.scaling.function_specs import Bounds, declared
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.spec import TimeoutsSpec

CALL = Call("run", 1, 3)
OWN = WeightVersion("run", 1, 0, "own")


class FakeCluster:
    """Remembers what was asked of it. With `gated` starts wait for the test."""

    lost = False

    def __init__(self, *, gated: bool = True) -> None:
        self.gated = gated
        self.begun: list[int] = []
        """Slots whose starts have begun, in order."""
        self.gates: dict[int, asyncio.Future[None]] = {}
        """Of the starts, by slot."""
        self.loads: dict[str, asyncio.Future[None]] = {}
        """Of replicas whose loads end when the test lets them, by name."""
        self.restless: set[str] = set()
        """Names of replicas that do not fall asleep."""
        self.stopped: list[str] = []
        self._slots: dict[str, int] = {}

    async def deploy(self, name: str, function: Any, settings: Sequence[int], node: str, stop_s: float) -> Any:
        slot = settings[0]
        self._slots[name] = slot
        self.begun.append(slot)
        self.gates[slot] = asyncio.get_running_loop().create_future()
        if not self.gated:
            self.gates[slot].set_result(None)
        return FakeHandle(name, self)

    async def wait_running(self, name: str, timeout_s: float) -> None:
        await self.gates[self._slots[name]]

    async def delete(self, names: Sequence[str]) -> None:
        self.stopped += names


class FakeDevices:
    """Has every device at once, and remembers which replicas use one."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.to_come: set[str] = set()
        """Names of devices whose node has to come."""

    async def acquire(self, allocation: Allocation, user: str, lost: Any) -> Allocation:
        self.users.add(user)
        return allocation

    def reserved(self, allocations: Sequence[Allocation], user: str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def finish_start(self, user: str) -> None: ...

    def must_come(self, allocation: Allocation) -> bool:
        return allocation.devices[0].name in self.to_come

    def bound(self, allocation: Allocation) -> Allocation:
        return allocation

    async def release(self, *users: str) -> None:
        self.users -= set(users)


class FakeHandle:
    """Answers every call at once, but for the loads that wait."""

    def __init__(self, name: str, cluster: FakeCluster) -> None:
        self._name = name
        self._cluster = cluster

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: self._answer(method))

    async def _answer(self, method: str) -> Reply[Any]:
        if method == "load" and self._name in self._cluster.loads:
            await self._cluster.loads[self._name]
        if method == "sleep" and self._name in self._cluster.restless:
            raise CallTimeout("waited 1 s for its memory")
        info = ReplicaInfo(f"{self._name}-1", 1, "here")
        proof = LoadProof(moved_nats=1.0, tensors=1, read_back=1, chart_s=3.0, load_s=1.0)
        slept = Slept(SleepTier.HOST, 1, 0)
        value = {"prove_loading": proof, "sleep": slept, "load": Loaded("", None)}.get(method, info)
        return Reply(info.incarnation, value, 0.0, 0.0, CallUsage())


class NoRecords:
    """Holdings and invocations that are of no interest."""

    def add_holding(self, holding: Any) -> None: ...

    def add_invocation(self, invocation: Any) -> None: ...

    def add_decision(self, decision: Any) -> None: ...


def pool_of(
    cluster: FakeCluster,
    *names: str,
    slots: int = 3,
    bounds: Bounds | None = None,
    function: FunctionName = FunctionName.GENERATION,
    given: Sequence[Allocation] = (),
) -> ReplicaPool:
    """A real pool, with replicas of these names that serve in the first slots, on the allocations that are `given`."""
    all_allocations = tuple(given) or tuple(Allocation.of([Device(f"cpu-{i}", "cpu-core", i)]) for i in range(slots))
    blueprint = Blueprint(
        declared()[function], object, all_allocations.index, all_allocations, bounds or Bounds(1, "min_actors")
    )
    pool = ReplicaPool(cluster, FakeDevices(), blueprint, CALL, TimeoutsSpec(), NoRecords())  # type: ignore[arg-type]
    for name, allocation in zip(names, all_allocations, strict=False):
        replica = pool._replicas[name] = Replica(name, function, allocation, NoRecords())
        replica.mark_adopted(FakeHandle(name, cluster), ReplicaInfo(f"{name}-1", 1, "here"))  # type: ignore[arg-type]
        replica.ask(OWN)
        replica.mark_loaded(OWN)
        assert replica.state is ReplicaState.SERVING
    return pool
