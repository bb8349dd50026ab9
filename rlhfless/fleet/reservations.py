"""Device reservations: Ray actors that hold devices for a run, so that Ray and a cluster autoscaler see its demand.

A `DeviceReservation` is a small Ray actor that requests whole devices of one node from Ray, and reports which it got.
An autoscaler sees pending reservations as demand. Replicas request no resources from Ray: they are placed on the
reservation's node and get the ids of its devices.

The `ReservationManager` is a detached Ray actor that owns the reservations of a run. It outlives the driver, so that a
resumed driver finds its devices still reserved. When its lease expires, it exits and its reservations end. The attempt
number fences off a driver that was believed dead.

Runs that share devices (`placement.tenants`) have one manager. It gives a run free devices while there are any, and
otherwise the devices with the fewest runs; a `TurnScheduler` orders the turns on those. A run whose driver has died
keeps its turn until its lease expires, which is later than the leases of its replicas.

Runs of a fleet (`placement.share`) have the devices of their engines at the same time, and join those of the fleet even
if others are free. The manager says which run starts an engine (`claim_engine`); the others wait for it.

Ray counts CPU cores but does not assign specific ones. A reservation locks a file per core, so that the runs of one
user on one machine get different cores; the kernel releases the locks when the process ends.

This module imports little, so that these Ray actors start fast.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayActorError

from rlhfless.functions.base import Lease, LeaseTerms
from rlhfless.scaling.turn_scheduler import TurnScheduler
from rlhfless.util.clock import monotonic_s
from rlhfless.util.folders import private

NAMESPACE = "rlhfless"
"""Ray namespace of the managers."""

SHARED_MANAGER = "shared-devices"
"""Name of the one manager of all runs that share devices."""

HEAD_RESOURCE = "node:__internal_head__"
"""Ray's resource of the head node. Managers run there, because no run survives the loss of the head node."""

DIED = (RayActorError, OutOfMemoryError, ActorUnschedulableError)
"""Errors of a call to a dead Ray actor. Ray raises no RayActorError if it killed the Ray actor for memory, or if its
node left before it had started."""

LOOK_S = 5.0
"""Interval at which a manager checks whether its lease has expired."""


class StaleReservation(RuntimeError):
    """The caller is the driver of an older attempt."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices that a reservation requests from Ray."""

    kind: str
    """Key of the price book."""
    devices: int
    gpu: bool
    """True for GPUs, False for CPU cores."""
    selectors: tuple[Mapping[str, str], ...] = ()
    """Labels of the wanted node, in order of preference."""
    fleet: str = ""
    """The fleet (rlhfless.scaling.fleets) whose engine works there, for several runs at the same time; empty for
    devices of one run, or of several in turns."""

    def is_met_by(self, other: Demand) -> bool:
        """Return whether devices reserved for `other` meet this demand, regardless of their node."""
        return (self.kind, self.devices, self.fleet) == (other.kind, other.devices, other.fleet)

    def options(self) -> dict[str, Any]:
        """Return the options of the reservation's Ray actor."""
        amount = {"num_cpus": 0, "num_gpus": self.devices} if self.gpu else {"num_cpus": self.devices}
        first, *others = self.selectors or ({},)
        options: dict[str, Any] = {**amount, "max_restarts": 0}
        if first:
            options["label_selector"] = first
        if others:
            options["fallback_strategy"] = [{"label_selector": labels} for labels in others]
        return options


@dataclass(frozen=True, slots=True)
class Held:
    """Devices that a reservation has."""

    reservation: str
    """Ray actor id. A new reservation may hold different devices."""
    node: str
    """Ray node id."""
    address: str
    local_ids: tuple[str, ...]
    """Core numbers, or entries of CUDA_VISIBLE_DEVICES after applying the mask that the node already had."""


class DeviceReservation:
    """A Ray actor that holds devices while it is alive."""

    def __init__(self, demand: Demand) -> None:
        self._locks = [] if demand.gpu else lock_cores(demand.devices, os.sched_getaffinity(0), core_folder())
        self._gpu = demand.gpu

    def held(self) -> Held:

        def order(local_id: str) -> tuple[int, str]:
            return (int(local_id), "") if local_id.isdecimal() else (0, local_id)

        context = ray.get_runtime_context()
        ids = sorted(context.get_accelerator_ids()["GPU"], key=order) if self._gpu else map(str, dict(self._locks))
        return Held(str(context.get_actor_id()), context.get_node_id(), ray.util.get_node_ip_address(), tuple(ids))


def function_of(group: str) -> str:
    """Return the function in the name of a device group (rlhfless.scaling.placement)."""
    return group.rpartition("-")[0]


def core_folder() -> Path:
    """Return the folder of this user's core locks. Raises NotPrivate if it belongs to another user."""
    return private(Path(tempfile.gettempdir()) / f"rlhfless-cores-{os.getuid()}")


def lock_cores(wanted: int, cores: Collection[int], folder: Path) -> list[tuple[int, int]]:
    """Lock `wanted` cores, lowest first; return their numbers with the open files that keep them locked.

    If other runs have locked too many, numbers beyond the last core are used. Nothing can be pinned to those, so the
    kernel's scheduler shares the cores.
    """
    locked: list[tuple[int, int]] = []
    for core in chain(sorted(cores), count(max(cores, default=-1) + 1)):
        if len(locked) == wanted:
            break
        file = os.open(folder / f"core-{core}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        locked.append((core, file))
    return locked


@dataclass(frozen=True, slots=True)
class Tenant:
    """A run's driver, as the manager knows it."""

    run_id: str
    attempt: int
    lease_s: float
    """Seconds without a call after which the manager releases all devices of the run."""
    most: int = 1
    """Maximum runs per device, including this run."""
    priority: int = 0
    left_s: float = math.inf
    """Seconds until the deadline of the run's step under its contract."""


@dataclass(frozen=True, slots=True)
class EngineClaim:
    """What a run does about the engine of a fleet on its devices."""

    engine: str
    """Name of its application."""
    starts: bool
    """This run starts it, and deletes `before` first. The others wait."""
    up: bool
    before: str = ""
    """The application on these devices before, which is broken, or whose runs have all left."""


@dataclass
class _SharedEngine:
    """The engine of a fleet on a device group."""

    name: str
    starter: str | None
    """The run that starts it; None once it is up."""
    members: dict[str, str] = field(default_factory=dict)
    """The replica's name in each run, by run id."""


@dataclass
class _DeviceGroup:
    """A reservation, pending or granted, and the runs that use it."""

    demand: Demand
    reservation: Any
    groups: dict[str, str]
    """The group's name in each run, by run id."""
    most: int
    held: Held | None = None
    engine: _SharedEngine | None = None
    """The engine of a fleet."""
    before: str = ""
    """Name of the engine before."""

    def admits(self, tenant: Tenant, demand: Demand) -> bool:
        room = len(self.groups) < min(self.most, tenant.most) and tenant.run_id not in self.groups
        return room and self.held is not None and demand.is_met_by(self.demand)


def _is_settled(group: _DeviceGroup, engine: _SharedEngine) -> bool:
    """Return whether a group's engine is up, or no longer its engine."""
    return engine.starter is None or group.engine is not engine


class ReservationManager:
    """Owns the reservations of a run, or of all runs that share devices. All methods are idempotent, renew the run's
    lease, and raise StaleReservation for an older attempt."""

    def __init__(self, lease_s: float) -> None:
        self._attempts: dict[str, int] = {}
        self._ends_s: dict[str, float] = {}
        self._groups: dict[str, _DeviceGroup] = {}
        self._names = count()
        self._turns = TurnScheduler()
        self._changes = asyncio.Condition()
        # Ray ends the reservations, which this Ray actor owns, when it exits.
        self._lease = Lease(LeaseTerms(first_s=lease_s, renewed_s=LOOK_S), lambda: os._exit(0))

    async def _admit(self, tenant: Tenant) -> None:
        newest = self._attempts.setdefault(tenant.run_id, tenant.attempt)
        if tenant.attempt < newest:
            raise StaleReservation(f"attempt {tenant.attempt} calls, but attempt {newest} has replaced it")
        now_s = monotonic_s()
        self._attempts[tenant.run_id], self._ends_s[tenant.run_id] = tenant.attempt, now_s + tenant.lease_s
        for run_id, end_s in list(self._ends_s.items()):
            if end_s < now_s:
                await self._drop(run_id)
        self._lease.renew(max(self._ends_s.values()) - now_s)

    async def _drop(self, run_id: str) -> None:
        """Drop a run that has left, or whose lease has expired."""
        for name, group in list(self._groups.items()):
            if run_id in group.groups:
                self._leave_group(name, run_id)
        self._ends_s.pop(run_id, None)
        self._turns.leave(run_id, monotonic_s())
        await self._notify_change()

    # -- devices

    async def hold(self, tenant: Tenant, group: str, demand: Demand, wait_s: float, room: bool) -> Held | None:
        """Reserve devices for a group; return None if the reservation is still pending after `wait_s`. A lost
        reservation is replaced. `room`: a node has the devices free; if not, try to share those of other runs."""
        await self._admit(tenant)
        name = self._name_of(tenant.run_id, group)
        if name is not None and not demand.is_met_by(self._groups[name].demand):
            self._leave_group(name, tenant.run_id)
            name = None
        if name is None or self._groups[name].held is None:
            # Also share devices that became available while the run's own reservation was pending.
            joins = name is not None or not room or bool(demand.fleet)
            shared = self._join_shared(tenant, group, demand) if joins else None
            if name is not None and shared is not None:
                self._leave_group(name, tenant.run_id)
            name = shared or name or self._reserve(tenant, group, demand)
        known = self._groups[name]
        try:
            known.held = await asyncio.wait_for(known.reservation.held.remote(), wait_s)
        except (TimeoutError, ActorUnavailableError):
            return None
        except DIED:
            if self._groups.get(name) is known:
                self._end(name)
            return None
        return known.held

    def _name_of(self, run_id: str, group: str) -> str | None:
        return next((name for name, known in self._groups.items() if known.groups.get(run_id) == group), None)

    def _join_shared(self, tenant: Tenant, group: str, demand: Demand) -> str | None:
        """Join the group with the fewest runs; return None if none admits the run. Ties go to the group with the
        fewest replicas of the same function, so that each device gets a mix of functions with different durations."""

        def crowd(name: str) -> tuple[int, int, str]:
            groups = self._groups[name].groups.values()
            if demand.fleet:  # the first actor of each run is the first engine of the fleet
                return -len(groups), -sum(each == group for each in groups), name
            return len(groups), sum(function_of(each) == function_of(group) for each in groups), name

        admitting = (name for name, known in self._groups.items() if known.admits(tenant, demand))
        name = min(admitting, key=crowd, default=None)
        if name is not None:
            known = self._groups[name]
            known.groups[tenant.run_id], known.most = group, min(known.most, tenant.most)
        return name

    def _reserve(self, tenant: Tenant, group: str, demand: Demand) -> str:
        make: Any = ray.remote(**demand.options())  # type: ignore[call-overload]  # Ray's types know no labels
        name = f"{next(self._names):06d}"
        reservation = make(DeviceReservation).remote(demand)
        self._groups[name] = _DeviceGroup(demand, reservation, {tenant.run_id: group}, tenant.most)
        return name

    async def held(self, tenant: Tenant, wait_s: float) -> dict[str, tuple[Demand, Held]]:
        """Return the run's groups with their demands and devices, and withdraw pending reservations."""
        await self._admit(tenant)
        run_id = tenant.run_id
        demands = {each.groups[run_id]: each.demand for each in self._groups.values() if run_id in each.groups}
        answers = await asyncio.gather(
            *(self.hold(tenant, group, demand, wait_s, room=True) for group, demand in demands.items())
        )
        found = {group: held for group, held in zip(demands, answers, strict=True) if held is not None}
        await self.release(tenant, [group for group in demands if group not in found])
        return {group: (demands[group], held) for group, held in found.items()}

    async def lost(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> list[str]:
        """Return the groups whose reservation has died. A timeout does not count as a loss."""
        await self._admit(tenant)

        async def is_lost(group: str) -> bool:
            name = self._name_of(tenant.run_id, group)
            if name is None:
                return True
            try:
                await asyncio.wait_for(self._groups[name].reservation.held.remote(), wait_s)
            except DIED:
                return True
            except (TimeoutError, ActorUnavailableError):
                pass
            return False

        gone = await asyncio.gather(*map(is_lost, groups))
        return [group for group, is_gone in zip(groups, gone, strict=True) if is_gone]

    async def release(self, tenant: Tenant, groups: Sequence[str]) -> None:
        """Release the devices of groups, or withdraw their demands. Unknown groups are ignored."""
        await self._admit(tenant)
        await self.pass_on(tenant, groups)
        for group in groups:
            if (name := self._name_of(tenant.run_id, group)) is not None:
                self._leave_group(name, tenant.run_id)
        await self._notify_change()

    async def leave(self, tenant: Tenant) -> None:
        """Drop a run that has ended."""
        await self._admit(tenant)
        await self._drop(tenant.run_id)
        if not self._ends_s:
            self._lease.renew()  # the next run may follow immediately

    def _leave_group(self, name: str, run_id: str) -> None:
        """Remove a run from a group; the last run to leave returns the devices to Ray."""
        self._leave_engine(self._groups[name], run_id)
        self._groups[name].groups.pop(run_id, None)
        if not self._groups[name].groups:
            self._end(name)

    def _end(self, name: str) -> None:
        ray.kill(self._groups.pop(name).reservation)

    # -- engines of fleets

    async def claim_engine(
        self, tenant: Tenant, group: str, replica: str, dead: str, wait_s: float
    ) -> EngineClaim | None:
        """Return what the run does about the engine on a device group, once that is up or the run has to start it; None
        if the run has lost the devices. After `wait_s`, return a claim of an engine that another run still starts.

        `replica`: the run's name for it. `dead`: an engine that the run has found broken; it is replaced.
        """
        await self._admit(tenant)
        run_id, end_s = tenant.run_id, monotonic_s() + wait_s
        while True:
            name = self._name_of(run_id, group)
            if name is None:
                return None
            found = self._groups[name]
            if found.engine is None or found.engine.name == dead:
                found.before = found.engine.name if found.engine is not None else found.before
                found.engine = _SharedEngine(f"fleet-{found.demand.fleet}-{next(self._names):06d}", run_id)
            engine = found.engine
            waits = engine.starter not in (None, run_id)
            left_s = end_s - monotonic_s()
            if not waits or left_s <= 0:
                engine.members[run_id] = replica
                return EngineClaim(engine.name, engine.starter == run_id, engine.starter is None, found.before)
            await self._until(partial(_is_settled, found, engine), left_s)

    async def engine_up(self, tenant: Tenant, engine: str) -> None:
        """Record that an engine, which the run has started, is up."""
        await self._admit(tenant)
        for found in self._groups.values():
            if found.engine is not None and found.engine.name == engine and found.engine.starter == tenant.run_id:
                found.engine.starter = None
        await self._notify_change()

    async def leave_engine(self, tenant: Tenant, group: str) -> str:
        """Remove a run from an engine. Return the engine's name if no other run has it: the run then deletes it before
        it releases the devices."""
        await self._admit(tenant)
        name = self._name_of(tenant.run_id, group)
        left = None if name is None else self._leave_engine(self._groups[name], tenant.run_id)
        await self._notify_change()
        return left or ""

    async def engines(self, tenant: Tenant) -> dict[str, tuple[str, str]]:
        """Return the engines that the run has joined: by its name for the replica, the group and the engine's name."""
        await self._admit(tenant)
        run_id = tenant.run_id
        return {
            each.engine.members[run_id]: (each.groups[run_id], each.engine.name)
            for each in self._groups.values()
            if run_id in each.groups and each.engine is not None and run_id in each.engine.members
        }

    @staticmethod
    def _leave_engine(group: _DeviceGroup, run_id: str) -> str | None:
        """Remove a run from a group's engine; return the engine's name if that leaves it to none."""
        engine = group.engine
        if engine is None:
            return None
        engine.members.pop(run_id, None)
        last = not engine.members
        if last or engine.starter == run_id:  # the next run to claim it starts another
            group.engine, group.before = None, engine.name
        return engine.name if last else None

    # -- turns

    def _names_of(self, run_id: str, groups: Sequence[str]) -> list[str]:
        names = (self._name_of(run_id, group) for group in groups)
        return [name for name in names if name is not None]

    async def turn(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> list[str]:
        """Wait for the run's turn on all these devices. Return an empty list when it has come, or, after `wait_s`, the
        runs whose turn it is; the request keeps its place in the queue."""
        await self._admit(tenant)
        asked_s = monotonic_s()

        def is_mine() -> bool:
            if self._attempts[tenant.run_id] != tenant.attempt or tenant.run_id not in self._ends_s:
                raise StaleReservation(f"attempt {tenant.attempt} waits for its turn, but has ended")
            names = self._names_of(tenant.run_id, groups)
            return self._turns.ask(tenant.run_id, names, tenant.priority, monotonic_s(), asked_s + tenant.left_s)

        if is_mine():
            return []
        await self._notify_change()  # `wanted` of an owner may wait for this request
        if await self._until(is_mine, wait_s):
            return []
        return self._turns.owners(self._names_of(tenant.run_id, groups)) or ["another run"]

    async def wanted(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> bool:
        """Wait up to `wait_s` for another run to request some of these devices on which it is this run's turn; return
        whether that happened."""
        await self._admit(tenant)
        run_id = tenant.run_id
        return await self._until(lambda: self._turns.wanted(run_id, self._names_of(run_id, groups)), wait_s)

    async def pass_on(self, tenant: Tenant, groups: Sequence[str]) -> None:
        """End the run's turn on these devices. The run must have nothing awake there."""
        await self._admit(tenant)
        self._turns.pass_on(tenant.run_id, self._names_of(tenant.run_id, groups), monotonic_s())
        await self._notify_change()

    async def _until(self, happens: Callable[[], bool], wait_s: float) -> bool:
        async with self._changes:
            try:
                await asyncio.wait_for(self._changes.wait_for(happens), wait_s)
            except TimeoutError:
                return False
            return True

    async def _notify_change(self) -> None:
        async with self._changes:
            self._changes.notify_all()


def reservation_manager(name: str, lease_s: float) -> Any:
    """Return the handle of the manager of this name without waiting; start the manager if there is none."""
    make: Any = ray.remote(  # type: ignore[call-overload]  # Ray's types do not know every option
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        resources={HEAD_RESOURCE: 0.0001},
    )
    return make(ReservationManager).remote(lease_s)


def existing_manager(name: str) -> Any | None:
    """Return the manager of this name, started by an earlier driver or another run; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
