"""The processes that hold devices for a run, so that Ray and a cluster autoscaler see what the run needs.

A *holder* is a small Ray actor that asks Ray for whole devices of one node and says which ones it got. One that pends
is the demand that an autoscaler sees. Replicas ask Ray for nothing: they are put on the holder's node and are told
which devices to use.

The run's *keeper* is the detached actor that owns its holders. It outlives the driver, so that a resumed driver finds
the devices still held, and ends by itself when its lease does; the holders, also those that pend, end with it. The
attempt number fences off a driver that was believed dead.

Runs that share devices (`placement.tenants`) have one keeper together. It puts a run on devices of its own while there
are free ones, and else on the devices with the fewest runs; and it says whose turn it is there (`TurnScheduler`).
A run whose driver has died keeps its turn until its lease ends, which is after its replicas have.

CPU cores: Ray counts them, and does not say which. A holder locks a file per core, so that the runs of one user on one
machine get different cores; the kernel gives the locks back when the holder ends, however it ends.

Imports little: an actor that only holds something should be there at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayActorError

from rlhfless.functions.lease import Lease, LeaseTerms
from rlhfless.scaling.turn_scheduler import TurnScheduler
from rlhfless.util.folders import private

NAMESPACE = "rlhfless"
"""Ray's namespace of the keepers."""

HEAD_RESOURCE = "node:__internal_head__"
"""Ray's resource of the head node: keepers are on it, because no run survives its loss anyway."""

DIED = (RayActorError, OutOfMemoryError, ActorUnschedulableError)
"""The errors of a call of an actor that has died. Ray's errors for an actor that it killed for memory, or whose node
left before it had started, are no RayActorErrors."""

LOOK_S = 5.0
"""How often a keeper looks whether its lease has ended."""


class StaleReservation(RuntimeError):
    """The caller is a driver of an older attempt."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a holder asks Ray for."""

    kind: str
    """Key of the price book."""
    devices: int
    gpu: bool
    """GPUs, or CPU cores."""
    selectors: tuple[Mapping[str, str], ...] = ()
    """Labels of the wanted node; further ones are tried in order if it has no room."""

    def is_met_by(self, other: Demand) -> bool:
        """Whether devices that were taken for the other demand meet this one, wherever they are."""
        return (self.kind, self.devices) == (other.kind, other.devices)

    def options(self) -> dict[str, Any]:
        """Ray's options for the holder."""
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
    """Devices that a holder has."""

    holder: str
    """Ray's id of the holder: another one may have got other devices."""
    node: str
    """Ray's id of the node."""
    address: str
    local_ids: tuple[str, ...]
    """Numbers of cores; or entries of CUDA_VISIBLE_DEVICES, composed with the mask that was already on the node."""


class DeviceReservation:
    """Holds devices by being there."""

    def __init__(self, demand: Demand) -> None:
        self._locks = [] if demand.gpu else lock_cores(demand.devices, os.sched_getaffinity(0), core_folder())
        self._gpu = demand.gpu

    def held(self) -> Held:
        """What it holds."""
        context = ray.get_runtime_context()
        ids = sorted(context.get_accelerator_ids()["GPU"], key=_in_order) if self._gpu else map(str, dict(self._locks))
        node, holder = context.get_node_id(), context.get_actor_id()
        return Held(str(holder), node, ray.util.get_node_ip_address(), tuple(ids))


def function_of(group: str) -> str:
    """The function that a group of devices is named for (rlhfless.scaling.placement)."""
    return group.rpartition("-")[0]


def _in_order(local_id: str) -> tuple[int, str]:
    return (int(local_id), "") if local_id.isdecimal() else (0, local_id)


def core_folder() -> Path:
    """The folder of this user's core locks, for the user alone. Raises NotPrivate if it belongs to another."""
    return private(Path(tempfile.gettempdir()) / f"rlhfless-cores-{os.getuid()}")


def lock_cores(wanted: int, cores: Collection[int], folder: Path) -> list[tuple[int, int]]:
    """Lock `wanted` of the cores, the lowest first; returns them with the open files that keep them locked.

    If other runs have locked too many, numbers above all cores take their place: nothing can be pinned to such a core,
    so the scheduler shares the machine out.
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
    """A run's driver, as its keeper knows it."""

    run_id: str
    attempt: int
    lease_s: float
    """How long the keeper waits for the next call before it gives back all devices of the run."""
    most: int = 1
    """Most runs on a device, this one included."""
    priority: int = 0
    left_s: float = math.inf
    """Seconds until the run's step should have ended by its contract."""


@dataclass
class _Seat:
    """Devices that a holder has or waits for, and the runs that use them."""

    demand: Demand
    holder: Any
    groups: dict[str, str]
    """By run: its name for them."""
    most: int
    held: Held | None = None

    def takes(self, tenant: Tenant, demand: Demand) -> bool:
        """Whether the run may share these devices."""
        room = len(self.groups) < min(self.most, tenant.most) and tenant.run_id not in self.groups
        return room and self.held is not None and demand.is_met_by(self.demand)


class ReservationManager:
    """Owns the holders of a run, or of all runs that share devices. All methods are idempotent, renew the run's lease,
    and raise StaleReservation for an older attempt of it."""

    def __init__(self, lease_s: float) -> None:
        self._attempts: dict[str, int] = {}
        self._ends_s: dict[str, float] = {}
        self._seats: dict[str, _Seat] = {}
        self._made = count()
        self._turns = TurnScheduler()
        self._changes = asyncio.Condition()
        # An actor that ends by itself: Ray ends what it owns.
        self._lease = Lease(LeaseTerms(first_s=lease_s, renewed_s=LOOK_S), lambda: os._exit(0))

    async def _admit(self, tenant: Tenant) -> None:
        newest = self._attempts.setdefault(tenant.run_id, tenant.attempt)
        if tenant.attempt < newest:
            raise StaleReservation(f"attempt {tenant.attempt} asks, but attempt {newest} has taken over")
        now_s = time.monotonic()
        self._attempts[tenant.run_id], self._ends_s[tenant.run_id] = tenant.attempt, now_s + tenant.lease_s
        for run_id, end_s in list(self._ends_s.items()):
            if end_s < now_s:
                await self._drop(run_id)
        self._lease.renew(max(self._ends_s.values()) - now_s)

    async def _drop(self, run_id: str) -> None:
        """Drop a run that has left, or whose driver has died and its replicas with it."""
        for name, seat in list(self._seats.items()):
            if run_id in seat.groups:
                self._leave_group(name, run_id)
        self._ends_s.pop(run_id, None)
        self._turns.leave(run_id, time.monotonic())
        await self._notify_change()

    # -- devices

    async def hold(self, tenant: Tenant, group: str, demand: Demand, wait_s: float, room: bool) -> Held | None:
        """The devices of the group's holder; None if it still pends after `wait_s`. A lost holder is replaced. `room`:
        a node has the devices free; without it they are shared with other runs."""
        await self._admit(tenant)
        name = self._seat_of(tenant.run_id, group)
        if name is not None and not demand.is_met_by(self._seats[name].demand):
            self._leave_group(name, tenant.run_id)
            name = None
        if name is None or self._seats[name].held is None:
            # What pends since another run was first is shared with it, too.
            shared = self._shared(tenant, group, demand) if name is not None or not room else None
            if name is not None and shared is not None:
                self._leave_group(name, tenant.run_id)
            name = shared or name or self._new(tenant, group, demand)
        seat = self._seats[name]
        try:
            seat.held = await asyncio.wait_for(seat.holder.held.remote(), wait_s)
        except (TimeoutError, ActorUnavailableError):
            return None
        except DIED:
            if self._seats.get(name) is seat:
                self._end(name)
            return None
        return seat.held

    def _seat_of(self, run_id: str, group: str) -> str | None:
        return next((name for name, seat in self._seats.items() if seat.groups.get(run_id) == group), None)

    def _shared(self, tenant: Tenant, group: str, demand: Demand) -> str | None:
        """Put the run on the seat with the fewest runs; None if none takes it. Among equals, on the seat that the
        fewest use for the same function: phases of functions differ in length, and so each device gets some of all."""

        def crowd(name: str) -> tuple[int, int, str]:
            groups = self._seats[name].groups.values()
            return len(groups), sum(function_of(each) == function_of(group) for each in groups), name

        fit = [name for name, seat in self._seats.items() if seat.takes(tenant, demand)]
        if not fit:
            return None
        name = min(fit, key=crowd)
        seat = self._seats[name]
        seat.groups[tenant.run_id], seat.most = group, min(seat.most, tenant.most)
        return name

    def _new(self, tenant: Tenant, group: str, demand: Demand) -> str:
        make: Any = ray.remote(**demand.options())  # type: ignore[call-overload]  # Ray's types know no labels
        name = f"{next(self._made):06d}"
        self._seats[name] = _Seat(demand, make(DeviceReservation).remote(demand), {tenant.run_id: group}, tenant.most)
        return name

    async def held(self, tenant: Tenant, wait_s: float) -> dict[str, tuple[Demand, Held]]:
        """What all groups of the run hold by now: holders that pend are given up."""
        await self._admit(tenant)
        known = {seat.groups[tenant.run_id]: seat.demand for seat in self._seats.values()
                 if tenant.run_id in seat.groups}  # fmt: skip
        answers = await asyncio.gather(
            *(self.hold(tenant, group, demand, wait_s, room=True) for group, demand in known.items())
        )
        held_by_group = {
            group: (known[group], held) for group, held in zip(known, answers, strict=True) if held is not None
        }
        await self.release(tenant, [group for group in known if group not in held_by_group])
        return held_by_group

    async def lost(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> list[str]:
        """The groups whose holder has died. A holder that does not answer in time may live."""
        await self._admit(tenant)

        async def is_lost(group: str) -> bool:
            name = self._seat_of(tenant.run_id, group)
            if name is None:
                return True
            try:
                await asyncio.wait_for(self._seats[name].holder.held.remote(), wait_s)
            except (TimeoutError, ActorUnavailableError):
                return False
            except DIED:
                return True
            return False

        gone = await asyncio.gather(*map(is_lost, groups))
        return [group for group, is_gone in zip(groups, gone, strict=True) if is_gone]

    async def release(self, tenant: Tenant, groups: Sequence[str]) -> None:
        """Give devices back, or take demands back. Unknown groups are fine."""
        await self._admit(tenant)
        await self.pass_on(tenant, groups)
        for group in groups:
            if (name := self._seat_of(tenant.run_id, group)) is not None:
                self._leave_group(name, tenant.run_id)

    async def leave(self, tenant: Tenant) -> None:
        """Drop a run that has ended."""
        await self._admit(tenant)
        await self._drop(tenant.run_id)
        if not self._ends_s:
            self._lease.renew()  # the next run may come at once

    def _leave_group(self, name: str, run_id: str) -> None:
        seat = self._seats[name]
        seat.groups.pop(run_id, None)
        if not seat.groups:
            self._end(name)

    def _end(self, name: str) -> None:
        ray.kill(self._seats.pop(name).holder)

    # -- turns

    def _names(self, run_id: str, groups: Sequence[str]) -> list[str]:
        names = (self._seat_of(run_id, group) for group in groups)
        return [name for name in names if name is not None]

    async def turn(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> list[str]:
        """Wait for the run's turn on all these devices; returns an empty list when it has come. Otherwise, after
        `wait_s`, the runs whose turn it is; the request keeps its place."""
        await self._admit(tenant)
        asked_s = time.monotonic()

        def is_mine() -> bool:
            if self._attempts[tenant.run_id] != tenant.attempt or tenant.run_id not in self._ends_s:
                raise StaleReservation(f"attempt {tenant.attempt} waits for its turn, but has ended")
            seats = self._names(tenant.run_id, groups)
            now_s = time.monotonic()
            return self._turns.ask(tenant.run_id, seats, tenant.priority, now_s, asked_s + tenant.left_s)

        if is_mine():
            return []
        await self._notify_change()  # an owner may wait for word that its devices are wanted
        if await self._until(is_mine, wait_s):
            return []
        return self._turns.owners(self._names(tenant.run_id, groups)) or ["another run"]

    async def wanted(self, tenant: Tenant, groups: Sequence[str], wait_s: float) -> bool:
        """Whether another run waits, within `wait_s`, for devices of these on which it is the run's turn."""
        await self._admit(tenant)
        run_id = tenant.run_id
        return await self._until(lambda: self._turns.wanted(run_id, self._names(run_id, groups)), wait_s)

    async def pass_on(self, tenant: Tenant, groups: Sequence[str]) -> None:
        """Pass the run's turn on these devices on; nothing of it is awake there."""
        await self._admit(tenant)
        self._turns.pass_on(tenant.run_id, self._names(tenant.run_id, groups), time.monotonic())
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


SHARED_MANAGER = "shared-devices"
"""Name of the one keeper of all runs that share devices."""


def reservation_manager(name: str, lease_s: float) -> Any:
    """The keeper of this name, made if need be. Returns its handle at once."""
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
    """The keeper of this name, if it lives: an earlier driver of a run has left it, or other runs use it."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
