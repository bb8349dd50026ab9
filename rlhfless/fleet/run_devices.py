"""The devices of a run: taken when the first replica on them starts, given back when the last has gone.

Replicas are planned on groups of devices (rlhfless.scaling.placement). A group that is taken is *bound*: its node and
its numbers there are known, and stay until it is given back. A group whose holder is lost takes its replicas along,
because Ray may give the devices to another run from then on.

A wait for devices says what it waits for within SAY_S, says it again, and ends after `timeouts.devices_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from rlhfless.fleet.cluster import Cluster, FleetError
from rlhfless.fleet.nodes import selector, shortage
from rlhfless.fleet.reservations import (
    DIED,
    SHARED_MANAGER,
    Demand,
    Held,
    StaleReservation,
    Tenant,
    existing_manager,
    reservation_manager,
)
from rlhfless.functions.base import Call, StaleCall
from rlhfless.scaling.accelerators import NODE_LABEL
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device, DeviceGroup, Node, Placement
from rlhfless.scaling.prices import Acquired, fitting
from rlhfless.spec import RunSpec
from rlhfless.telemetry.progress import FOR_DEVICES
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)

SAY_S = 5.0
"""A longer wait for devices is shown, with a status that is never older than this. A free device takes a second."""

SAY_AGAIN_S = 30.0
"""Between two lines of the log about the same wait."""

CALL_S = 30.0
"""Longest wait for an answer of the reservation manager, its own start included."""

Lost = Callable[[str], None]
"""Called with the reason when the devices of a replica are lost."""

Shown = Callable[[str], AbstractContextManager[None]]
"""Shows a text as long as the block lasts."""


class NoDevices(FleetError):
    """Devices did not become free in time; the text says which, what is free, and how long the run waited."""


@dataclass
class _Taken:
    users: dict[str, Lost] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Users that are not up yet: their own leases are longer."""
    held: Held | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunDevices:
    """Takes and returns a run's device groups."""

    def __init__(
        self, cluster: Cluster, placement: Placement, call: Call, spec: RunSpec, priority: int, shown: Shown
    ) -> None:
        """`priority`: of the run, among those that share devices with it."""
        self._cluster = cluster
        self._placement = placement
        self._call = call
        self.timeouts = spec.timeouts
        self._lease_s = spec.recovery.lease_s
        self._tenants = spec.placement.tenants
        self._priority = priority
        self.shown = shown
        self._manager: Any = None
        self._taken: dict[str, _Taken] = {}
        self._to_come: frozenset[str] = frozenset()
        self.all_up = asyncio.Event()
        """No user starts any more, so the lease should be renewed now: it is much shorter from here on, and a driver
        that is killed before would leave its devices held for as long as a start may take."""
        self.acquired: Callable[[Acquired], None] = lambda _: None
        """Called with each wait for devices that has ended."""
        self.left_s: Callable[[], float] = lambda: math.inf
        """Seconds until the run's step should have ended by its contract."""

    @property
    def shared(self) -> bool:
        """Whether other runs may be on the same devices."""
        return self._tenants > 1

    # -- taking and giving back

    async def acquire(self, allocation: Allocation, user: str, lost: Lost) -> Allocation:
        """Return the allocation with its devices bound; `user` holds them until `release`. `lost` is called if they are
        lost. Raises NoDevices after `timeouts.devices_s`, or StaleCall if a newer attempt of the run has replaced this
        one."""
        groups = self._placement.groups_of(allocation)
        for group in groups:
            taken = self._taken.setdefault(group.name, _Taken())
            taken.users[user] = lost
            taken.starting.add(user)
        await gather_or_cancel(*map(self._take, groups))
        return self._bound(allocation)

    @contextlib.asynccontextmanager
    async def reserved(self, allocations: Sequence[Allocation], user: str) -> AsyncIterator[None]:
        """Hold these devices within the block in a run that shares devices, so that it can take its turn there before
        anything starts. Raises as `acquire`."""
        try:
            if self.shared:
                await gather_or_cancel(*(self.acquire(each, user, lambda _: None) for each in allocations))
            yield
        finally:
            await self.release(user)

    def finish_start(self, user: str) -> None:
        """Record that a user has started; its lease is renewed from now on."""
        for taken in self._taken.values():
            taken.starting.discard(user)
        if not self._any_starts:
            self.all_up.set()

    @property
    def _any_starts(self) -> bool:
        return any(taken.starting for taken in self._taken.values())

    async def release(self, *users: str) -> None:
        """Return the devices of replicas that have ended, or never started, unless other replicas use them."""
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
        """Count the devices of a kind that replicas of the run have, or wait for."""
        return sum(len(group.devices) for group in self._placement.groups if group.name in self._taken
                   and group.kind == kind)  # fmt: skip

    def bound(self, allocation: Allocation) -> Allocation | None:
        """Return the allocation with its devices bound; None if the run does not hold them."""
        groups = self._placement.groups_of(allocation)
        return self._bound(allocation) if all(map(self._holds, groups)) else None

    def _bound(self, allocation: Allocation) -> Allocation:
        devices: dict[str, Device] = {}
        for group in self._placement.groups_of(allocation):
            taken = self._taken.get(group.name)
            if taken is None or taken.held is None:
                raise NoDevices(f"devices {group.name} were lost as soon as they were there")
            devices |= group.bound(taken.held.node, taken.held.local_ids)
        return replace(allocation, devices=tuple(devices[device.name] for device in allocation.devices))

    def must_come(self, allocation: Allocation) -> bool:
        """Return whether a replica there would wait for a new node: its devices were free on no node when last read."""
        return any(group.name in self._to_come and not self._holds(group) for group in
                   self._placement.groups_of(allocation))  # fmt: skip

    async def at_hand(self) -> Callable[[Allocation], bool]:
        """Return a function that tells whether an allocation's devices are held, or free on a node of the cluster."""
        nodes = await self._cluster.nodes("")

        def there(allocation: Allocation) -> bool:
            missing = [group for group in self._placement.groups_of(allocation) if not self._holds(group)]
            return len(fitting(missing, nodes)) == len(missing)

        return there

    @property
    def waiting(self) -> bool:
        return any(taken.users and taken.held is None for taken in self._taken.values())

    def places(self, allocation: Allocation) -> list[str]:
        """Return the names of an allocation's devices in the cluster, the same for every run; empty if not held."""
        groups = self._placement.groups_of(allocation)
        held = [self._taken[group.name].held for group in groups if self._holds(group)]
        return [f"{each.address} {allocation.devices[0].kind} {number}" for each in held if each is not None
                for number in each.local_ids]  # fmt: skip

    def reservations_of(self, allocations: Sequence[Allocation]) -> dict[str, str]:
        """Return the groups of these allocations that the run holds, with their reservations."""
        groups = {group.name for each in allocations for group in self._placement.groups_of(each)}
        return {name: taken.held.reservation for name, taken in self._taken.items() if name in groups and taken.held}

    def _holds(self, group: DeviceGroup) -> bool:
        return group.name in self._taken and self._taken[group.name].held is not None

    async def look(self) -> None:
        """Read which devices are free, for `must_come`."""
        missing = [group for group in self._placement.groups if not self._holds(group)]
        nodes = await self._cluster.nodes("") if missing else ()
        self._to_come = frozenset(group.name for group in missing) - fitting(missing, nodes)

    # -- waiting

    async def _take(self, group: DeviceGroup) -> None:
        """Wait until the run holds the group."""
        taken = self._taken[group.name]
        async with taken.asking:
            nodes, asked_s = await self._cluster.nodes(group.kind), time.time()
            held = await self.ask("hold", group.name, _demand(group, nodes), SAY_S, _room(group, nodes))
            if held is None:
                held = await self._wait(group)
            if taken.held is None:
                came = all(node.name != held.node for node in nodes)
                self.acquired(Acquired(group.kind, len(group.devices), asked_s, time.time(), came))
            self._set_held(group, held)

    async def _wait(self, group: DeviceGroup) -> Held:
        began_s = time.monotonic() - SAY_S
        told_s = -SAY_AGAIN_S
        while True:
            waited_s = time.monotonic() - began_s
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
                held = await self.ask("hold", group.name, _demand(group, nodes), SAY_S, _room(group, nodes))
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

    # -- the life of what is held

    async def renew(self) -> None:
        """Renew the lease of the devices, and notify replicas whose devices were lost. Raises StaleCall if a newer
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
        """Give up the replicas on lost devices: another run may get the devices."""
        taken = self._taken.get(group)
        if taken is None or taken.held is None:
            return
        taken.held = None
        for lost in list(taken.users.values()):
            lost(f"its devices ({group}) are lost: what held them has died")

    async def adopt(self) -> None:
        """Adopt the devices of an earlier driver of the run; `settle` returns those without a replica."""
        self._manager = await asyncio.to_thread(existing_manager, self._manager_name)
        if self._manager is None:
            return
        try:
            left = await self.ask("held", SAY_S)
        except FleetError as error:
            log.warning("devices of an earlier attempt not adopted: %s", error)
            return
        for group in self._placement.groups:
            demand, held = left.pop(group.name, (None, None))
            if held is not None and _demand(group, ()).is_met_by(demand):
                self._taken[group.name] = _Taken(held=held)

    def add_user(self, allocation: Allocation, user: str, lost: Lost) -> None:
        """Record that `user`, such as a replica of an earlier driver, uses the run's part of these devices."""
        for group in self._placement.groups_of(allocation):
            if group.name in self._taken:
                self._taken[group.name].users[user] = lost

    async def settle(self) -> None:
        """Return devices of an earlier driver that no replica uses."""
        if self._manager is not None:
            await self.release()
            await self._give_back([group.name for group in self._placement.groups if group.name not in self._taken])

    async def close(self) -> None:
        """Return everything. A private cluster ends with all that it holds anyway."""
        if self._manager is None or self._cluster.private:
            return
        try:
            await self.ask("leave")
        except (StaleCall, FleetError) as error:
            log.info("reservation manager not reached; it ends with its lease: %s", error)
            return
        if not self.shared:
            await asyncio.to_thread(ray.kill, self._manager)

    # -- calls of the manager

    @property
    def _manager_name(self) -> str:
        return SHARED_MANAGER if self.shared else self._call.run_id

    @property
    def _lease_of_devices_s(self) -> float:
        """The lease of the devices: longer than the lease of the replicas on them plus their orderly stop, so that no
        other run gets a device that a replica still uses."""
        return 2 * self._lease_s + self.timeouts.drain_s + (self.timeouts.start_s if self._any_starts else 0.0)

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call the manager. Raises StaleCall; FleetError if it does not answer, or is lost with all reservations."""
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
    """Return the demand of a group: its planned node first, if that is among `nodes`. Ray fails an actor that asks for
    a node that has left, whatever the alternatives, and an autoscaler would not see the demand."""
    gpu, count = group.kind != CPU_KIND, len(group.devices)
    anywhere = selector(group.kind) if gpu else {}
    if all(node.name != group.node for node in nodes):
        return Demand(group.kind, count, gpu, (anywhere,) if gpu else ())
    planned = {NODE_LABEL: group.node}
    return Demand(group.kind, count, gpu, (planned, anywhere or {NODE_LABEL: f"!in({group.node})"}))


def _room(group: DeviceGroup, nodes: Sequence[Node]) -> bool:
    """Return whether a node has the devices of a group free."""
    return any(node.free(group.kind) >= len(group.devices) for node in nodes)
