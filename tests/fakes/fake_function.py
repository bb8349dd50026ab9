"""A trivial function that reports where it runs, for tests of the fleet on a real Ray."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import ray

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica
from rlhfless.fleet.replicas import Blueprint
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.base import DeviceBinding, Function, LeaseTerms
from rlhfless.functions.calls import Call, Reply
from rlhfless.functions.launching import binding
from rlhfless.records import FunctionName, Holding, Invocation
from rlhfless.scaling.function_specs import Bounds, declared
from rlhfless.scaling.placement import Allocation, ReplicaRequest, Site, place
from rlhfless.spec import PlacementSpec, RunSpec, TimeoutsSpec

LEASE_S = 20.0

SMALL = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


@dataclass(frozen=True, slots=True)
class StandInSettings:
    run_id: str
    lease: LeaseTerms
    binding: DeviceBinding


class StandIn(Function):
    """Reports where it runs."""

    def __init__(self, settings: StandInSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()

    async def where(self, call: Call) -> Reply[tuple[str, str]]:
        """Return the address of its node, and its mask of GPUs."""
        self.admit(call)
        return self.reply((ray.util.get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]), time.time())


class NoRecords:
    """Discards holdings and invocations."""

    def add_holding(self, holding: Holding) -> None: ...

    def add_invocation(self, invocation: Invocation) -> None: ...


@dataclass
class StandInRun:
    """A run with fake actors and fake scoring."""

    call: Call
    cluster: Cluster
    devices: RunDevices
    actors: ReplicaPool
    scoring: ReplicaPool
    shown: list[tuple[float, str]] = field(default_factory=list)
    """Messages shown to the user while the run waited for devices, with their monotonic times."""

    async def where(self, replica: Replica) -> tuple[str, list[str]]:
        """Return the address of a replica's node, and its GPUs there."""
        address, mask = await replica.call("where", self.call, timeout_s=20, waiting_for="its place")
        return address, mask.split(",") if mask else []

    async def add(self, pool: ReplicaPool, slot: int) -> tuple[str, list[str]]:
        """Start a replica, and return where it runs."""
        return await self.where(await pool.add(self.call, slot))


@asynccontextmanager
async def stand_in_run(
    run_id: str, spec: PlacementSpec, *, actors: int, per_actor: int = 1, devices_s: float = 60.0, attempt: int = 1
) -> AsyncIterator[StandInRun]:
    """Start a run on the Ray that this process has joined. At the end its devices are free again."""
    call, cluster = Call(run_id, attempt, 0), Cluster()
    cluster._kinds = ("h100",)
    timeouts = TimeoutsSpec(start_s=60, drain_s=2, devices_s=devices_s)
    placement = place(
        spec,
        await cluster.nodes(None),
        [
            ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA, actors, per_actor),
            ReplicaRequest(FunctionName.SCORING, Site.CPU),
        ],
    )
    told: list[tuple[float, str]] = []

    @contextmanager
    def shown(text: str) -> Iterator[None]:
        told.append((time.monotonic(), text))
        yield

    run_spec = RunSpec.model_validate(SMALL | {"recovery": {"lease_s": LEASE_S}})
    run_spec = run_spec.model_copy(update={"placement": spec, "timeouts": timeouts})
    devices = RunDevices(cluster, placement, call, run_spec, 0, shown)

    def settings(allocation: Allocation) -> StandInSettings:
        return StandInSettings(run_id, LeaseTerms(120, 60), binding(allocation.devices, exclusive=False))

    def pool(function: FunctionName) -> ReplicaPool:
        blueprint = Blueprint(declared()[function], StandIn, settings, placement.allocations[function], Bounds(0))
        return ReplicaPool(cluster, devices, blueprint, call, timeouts, NoRecords())

    run = StandInRun(call, cluster, devices, pool(FunctionName.GENERATION), pool(FunctionName.SCORING), told)
    try:
        yield run
    finally:
        for of_function in (run.actors, run.scoring):
            await of_function.close()
            await of_function.stop(*of_function.replicas())
        await devices.close()
