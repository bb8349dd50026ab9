"""The devices of a run: acquired when the first replica on them starts, released when the last one has ended.

Replicas are planned on groups of devices (rlhfless.scaling.placement). An acquired group is *bound*: its node and its
device numbers there are known, and do not change until it is released. If a group's reservation is lost, its replicas
are given up too, because Ray may then give the devices to another run.

A wait for devices reports its reason after SAY_S and periodically from then on, and ends after `timeouts.devices_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.nodes import selector, shortage
from rlhfless.fleet.protocols import FleetError, Lost, NoDevices
from rlhfless.fleet.reservations import (
    DIED,
    SHARED_MANAGER,
    Demand,
    Held,
    StaleReservation,
    Tenant,
    existing_manager,
    function_of,
    reservation_manager,
)
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.calls import Call, StaleCall
from rlhfless.scaling.latency.devices import NODE_LABEL
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device, DeviceGroup, HeldGroup, Node, Placement
from rlhfless.scaling.prices import Acquired, fitting
from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import FOR_DEVICES
from rlhfless.util.clock import monotonic_s, unix_s
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)

SAY_S = 5.0
"""Longer waits for devices are shown, and the status is refreshed at this interval. A free device takes a second."""

SAY_AGAIN_S = 30.0
"""Interval between log lines about the same wait."""

CALL_S = 30.0
"""Timeout for an answer of the reservation manager, including its start."""

Shown = Callable[[str], AbstractContextManager[None]]
"""Shows a status text for the duration of the block."""


@dataclass
class _Taken:
    users: dict[str, Lost] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Users that are still starting; their leases are longer."""
    held: Held | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunDevices:
    """Acquires and releases the device groups of a run."""

    def __init__(
        self,
        cluster: Cluster,
        placement: Placement,
        call: Call,
        spec: RunSpec,
        priority: int,
        shown: Shown,
        fleets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`priority`: rank of the run among runs that share devices. `shown` shows the status of a wait. `fleets`: the
        fleet (rlhfless.scaling.fleets) that shares the devices of a function, by function."""
        self._cluster = cluster
        self.placement = placement
        """Set before the first device is acquired: that of an elastic run depends on what it holds."""
        self._call = call
        self.timeouts = spec.timeouts
        self._lease_s = spec.recovery.lease_s
        self._tenants = spec.placement.tenants
        self._fleets = fleets
        self._priority = priority
        self.shown = shown
        self._manager: Any = None
        self._taken: dict[str, _Taken] = {}
        self._left_over: Collection[str] = ()
        """Groups of an earlier driver that the placement does not have."""
        self._to_come: frozenset[str] = frozenset()
        self.engines: Mapping[str, tuple[str, str]] = {}
        """Shared engines that an earlier driver has joined: by the replica's name, the device group and the engine's
        name."""
        self.all_up = asyncio.Event()
        """Set when no user is starting any more. The lease is then much shorter and must be renewed at once: until
        that renewal, a killed driver leaves its devices held for as long as a start may take."""
        self.acquired: Callable[[Acquired], None] = lambda _: None
        """Called at the end of each wait for devices."""
        self.left_s: Callable[[], float] = lambda: math.inf
        """Seconds until the deadline of the run's step under its contract."""

    @property
    def shared(self) -> bool:
        """Whether other runs may be on the same devices."""
        return self._tenants > 1

    def group_at(self, binding: DeviceBinding) -> str:
        """Return the name of the device group with these devices, which the run holds."""
        for name, taken in self._taken.items():
            held = taken.held
            if held is not None and held.node == binding.node and set(binding.ids) <= set(held.local_ids):
                return name
        raise NoDevices(f"devices {', '.join(binding.ids)} were lost as soon as they were there")

    def _demand(self, group: DeviceGroup, nodes: Sequence[Node]) -> Demand:
        """Return the demand of a group; see the function `_demand`."""
        return replace(_demand(group, nodes), fleet=self._fleets.get(function_of(group.name), ""))

    # -- acquire and release

    async def acquire(self, allocation: Allocation, user: str, lost: Lost) -> Allocation:
        """Acquire devices for `user` until `release`, and return the allocation with its devices bound. `lost` is
        called if they are lost. Raises NoDevices after `timeouts.devices_s`, or StaleCall if a newer attempt of the run
        has replaced this one."""
        groups = self.placement.groups_of(allocation)
        for group in groups:
            taken = self._taken.setdefault(group.name, _Taken())
            taken.users[user] = lost
            taken.starting.add(user)
        await gather_or_cancel(*map(self._take, groups))
        return self._bound(allocation)

    @contextlib.asynccontextmanager
    async def reserved(self, allocations: Sequence[Allocation], user: str) -> AsyncIterator[None]:
        """Hold these devices within the block if the run shares devices, so that it can take its turn there before
        anything starts. Raises as `acquire`."""
        try:
            if self.shared:
                await gather_or_cancel(*(self.acquire(each, user, lambda _: None) for each in allocations))
            yield
        finally:
            await self.release(user)

    def finish_start(self, user: str) -> None:
        """Record that a user has started."""
        for taken in self._taken.values():
            taken.starting.discard(user)
        if not self._any_starts:
            self.all_up.set()

    @property
    def _any_starts(self) -> bool:
        return any(taken.starting for taken in self._taken.values())

    async def release(self, *users: str) -> None:
        """Release the devices of replicas that have ended or never started, unless other replicas use them."""
        unused = []
        for name, taken in self._taken.items():
            for user in users:
                taken.users.pop(user, None)
                taken.starting.discard(user)
            if not taken.users:
                unused.append(name)
        for name in unused:
            del self._taken[name]
        if unused:
            await self._give_back(unused)

    async def _give_back(self, groups: Sequence[str]) -> None:
        if self._manager is None or self._cluster.lost:
            return
        try:
            await self.ask("release", groups)
        except StaleCall:
            pass  # they belong to the newer attempt now
        except FleetError as error:
            log.warning("devices not returned in order; they return when their lease ends: %s", error)

    def held(self, kind: str) -> int:
        """Count the devices of a kind that replicas of the run hold or wait for."""
        return sum(len(group.devices) for group in self.placement.groups if group.name in self._taken
                   and group.kind == kind)  # fmt: skip

    def bound(self, allocation: Allocation) -> Allocation | None:
        """Return the allocation with its devices bound; None if the run does not hold them."""
        groups = self.placement.groups_of(allocation)
        return self._bound(allocation) if all(map(self._holds, groups)) else None

    def _bound(self, allocation: Allocation) -> Allocation:
        devices: dict[str, Device] = {}
        for group in self.placement.groups_of(allocation):
            taken = self._taken.get(group.name)
            if taken is None or taken.held is None:
                raise NoDevices(f"devices {group.name} were lost as soon as they were there")
            devices |= group.bound(taken.held.node, taken.held.local_ids)
        return replace(allocation, devices=tuple(devices[device.name] for device in allocation.devices))

    def must_come(self, allocation: Allocation) -> bool:
        """Return whether a replica there would wait for a new node. Uses the free devices as of the last `look`."""
        return any(group.name in self._to_come and not self._holds(group) for group in
                   self.placement.groups_of(allocation))  # fmt: skip

    def places(self, allocation: Allocation) -> list[str]:
        """Return the cluster-wide names of an allocation's devices, equal for all runs; empty if not held."""
        groups = self.placement.groups_of(allocation)
        held = [self._taken[group.name].held for group in groups if self._holds(group)]
        return [f"{each.address} {allocation.devices[0].kind} {number}" for each in held if each is not None
                for number in each.local_ids]  # fmt: skip

    def reservations_of(self, allocations: Sequence[Allocation]) -> dict[str, str]:
        """Return the reservation ids of the groups of these allocations that the run holds, by group."""
        groups = {group.name for each in allocations for group in self.placement.groups_of(each)}
        return {name: taken.held.reservation for name, taken in self._taken.items() if name in groups and taken.held}

    def _holds(self, group: DeviceGroup) -> bool:
        return group.name in self._taken and self._taken[group.name].held is not None

    async def look(self) -> None:
        """Refresh the free devices, for `must_come`."""
        missing = [group for group in self.placement.groups if not self._holds(group)]
        nodes = await self._cluster.nodes("") if missing else ()
        self._to_come = frozenset(group.name for group in missing) - fitting(missing, nodes)

    # -- waiting

    async def _take(self, group: DeviceGroup) -> None:
        """Wait until the run holds the group."""
        taken = self._taken[group.name]
        async with taken.asking:
            nodes, asked_s = await self._cluster.nodes(group.kind), unix_s()
            held = await self.ask("hold", group.name, self._demand(group, nodes), SAY_S, _room(group, nodes))
            if held is None:
                held = await self._wait(group)
            if taken.held is None:
                came = all(node.name != held.node for node in nodes)
                self.acquired(Acquired(group.kind, len(group.devices), asked_s, unix_s(), came))
            self._set_held(group, held)

    async def _wait(self, group: DeviceGroup) -> Held:
        began_s = monotonic_s() - SAY_S
        told_s = -SAY_AGAIN_S
        while True:
            waited_s = monotonic_s() - began_s
            nodes = await self._cluster.nodes(group.kind)
            reason = shortage(group, nodes)
            text = f"{FOR_DEVICES} ({waited_s:.0f} s of at most {self.timeouts.devices_s:.0f} s): {reason}"
            if waited_s > self.timeouts.devices_s:
                raise NoDevices(
                    f"waited {waited_s:.0f} s (timeouts.devices_s) for devices: {reason}. Wait until they are free, "
                    "lower placement.devices, or see why the autoscaler brings no node"
                )
            if waited_s - told_s >= SAY_AGAIN_S:
                log.warning("%s", text)
                told_s = waited_s
            with self.shown(text):
                held = await self.ask("hold", group.name, self._demand(group, nodes), SAY_S, _room(group, nodes))
            if held is not None:
                return held

    def _set_held(self, group: DeviceGroup, held: Held) -> None:
        taken = self._taken.get(group.name)
        if taken is None:
            return  # released meanwhile
        before, taken.held = taken.held, held
        if before is None:
            ids = ", ".join(held.local_ids)
            log.info("%s: %s %s of node %s (%s)", group.name, group.kind, ids, held.address, held.node)
        elif before != held:
            self._notify_lost(group.name)
            taken.held = held

    # -- leases and losses

    async def renew(self) -> None:
        """Renew the lease of the devices, and give up replicas whose devices were lost. Raises StaleCall if a newer
        attempt has replaced this one."""
        names = [name for name, taken in self._taken.items() if taken.held is not None]
        if self._manager is None or self._cluster.lost:
            return
        await self.look()
        try:
            gone = await self.ask("lost", names, SAY_S)
        except FleetError as error:
            log.warning("%s", error)
            return
        for name in gone:
            self._notify_lost(name)

    def _notify_lost(self, group: str) -> None:
        """Notify the users of a lost group: another run may get its devices."""
        taken = self._taken.get(group)
        if taken is None or taken.held is None:
            return
        taken.held = None
        for lost in list(taken.users.values()):
            lost(f"its devices ({group}) are lost: what held them has died")

    async def _held_before(self) -> dict[str, tuple[Demand, Held]]:
        """Return the groups that the run's earlier attempt holds, by name."""
        self._manager = await asyncio.to_thread(existing_manager, self._manager_name)
        if self._manager is None:
            return {}
        try:
            held: dict[str, tuple[Demand, Held]] = await self.ask("held", SAY_S)
        except FleetError as error:
            log.warning("devices of an earlier attempt not adopted: %s", error)
            return {}
        return held

    async def held_groups(self) -> list[HeldGroup]:
        """Return the groups that the run's earlier attempt holds."""
        held = await self._held_before()
        return [HeldGroup(name, at.node, demand.kind, demand.devices) for name, (demand, at) in held.items()]

    async def adopt(self) -> None:
        """Adopt the devices of an earlier attempt of the run. `settle` releases those without a replica."""
        left: dict[str, Any] = {**await self._held_before()}
        for group in self.placement.groups:
            demand, held = left.pop(group.name, (None, None))
            if held is not None and self._demand(group, ()).is_met_by(demand):
                self._taken[group.name] = _Taken(held=held)
        self._left_over = [*left]
        if self._fleets and self._manager is not None:
            self.engines = await self.ask("engines")

    def add_user(self, allocation: Allocation, user: str, lost: Lost) -> None:
        """Record that `user`, such as a replica of an earlier driver, uses these devices, where the run holds them."""
        for group in self.placement.groups_of(allocation):
            if group.name in self._taken:
                self._taken[group.name].users[user] = lost

    async def settle(self) -> None:
        """Release devices of an earlier driver that no replica uses."""
        if self._manager is not None:
            await self.release()
            unused = [group.name for group in self.placement.groups if group.name not in self._taken]
            await self._give_back([*unused, *self._left_over])

    async def close(self) -> None:
        """Release all devices. Does nothing in a private cluster, which stops with its reservations."""
        if self._manager is None or self._cluster.private:
            return
        try:
            await self.ask("leave")
        except (StaleCall, FleetError) as error:
            log.info("reservation manager not reached; it ends with its lease: %s", error)
            return
        if not self.shared:
            await asyncio.to_thread(ray.kill, self._manager)

    # -- calls to the manager

    @property
    def _manager_name(self) -> str:
        return SHARED_MANAGER if self.shared else self._call.run_id

    @property
    def _lease_of_devices_s(self) -> float:
        """The lease of the devices. It is longer than the lease of the replicas plus their orderly stop, so that no
        other run gets a device that a replica still uses."""
        return 2 * self._lease_s + self.timeouts.drain_s + (self.timeouts.start_s if self._any_starts else 0.0)

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call the manager. Raises StaleCall, or FleetError if it does not answer, or is lost with all reservations."""
        try:
            if self._manager is None:
                self._manager = reservation_manager(self._manager_name, self._lease_of_devices_s)
            run_id, attempt = self._call.run_id, self._call.attempt
            tenant = Tenant(run_id, attempt, self._lease_of_devices_s, self._tenants, self._priority, self.left_s())
            return await asyncio.wait_for(getattr(self._manager, method).remote(tenant, *arguments), CALL_S)
        except RayTaskError as error:
            if isinstance(error.cause, StaleReservation):
                raise StaleCall(f"devices of run {self._call.run_id}: {error.cause}") from error
            raise
        except TimeoutError:
            raise FleetError(f"the run's reservation manager did not answer within {CALL_S:.0f} s") from None
        except ActorUnavailableError as error:
            raise FleetError(f"the run's reservation manager cannot be reached for now: {error}") from error
        except DIED as error:
            self._manager = None
            for name in list(self._taken):
                self._notify_lost(name)
            raise FleetError(f"the run's reservation manager was lost, and all devices with it: {error}") from error


def _demand(group: DeviceGroup, nodes: Sequence[Node]) -> Demand:
    """Return the demand of a group, with a preference for its planned node if that is among `nodes`. Ray fails a
    request for a node that has left, even with alternatives, and an autoscaler would not see the demand."""
    gpu, count = group.kind != CPU_KIND, len(group.devices)
    anywhere = selector(group.kind) if gpu else {}
    if all(node.name != group.node for node in nodes):
        return Demand(group.kind, count, gpu, (anywhere,) if gpu else ())
    planned = {NODE_LABEL: group.node}
    return Demand(group.kind, count, gpu, (planned, anywhere or {NODE_LABEL: f"!in({group.node})"}))


def _room(group: DeviceGroup, nodes: Sequence[Node]) -> bool:
    """Return whether one of the nodes has enough free devices for a group."""
    return any(node.free(group.kind) >= len(group.devices) for node in nodes)
