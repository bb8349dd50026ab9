"""The replicas of one function: start them, adopt those of an earlier driver, probe, and stop them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.fleet.handles import HandleLost
from rlhfless.fleet.protocols import FleetError, ReplicaCluster, ReplicaDevices
from rlhfless.fleet.replica import CallTimeout, Recorder, Replica, ReplicaLost
from rlhfless.functions.calls import Call, ReplicaInfo, StaleCall, settings_key
from rlhfless.records import ReplicaState
from rlhfless.scaling.function_specs import Bounds, FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import TimeoutsSpec
from rlhfless.util.tasks import gather_or_cancel


@dataclass(frozen=True)
class Blueprint:
    kind: FunctionSpec
    deployment: type
    settings: Callable[[Allocation], Any]
    """Returns the deployment's settings for a replica on an allocation with bound devices."""
    allocations: tuple[Allocation, ...]
    """One allocation per slot: their number is the maximum number of replicas at a time."""
    bounds: Bounds


log = logging.getLogger(__name__)

PROBE_S = 10.0
"""Timeout for an answer that costs a replica nothing. It is long, because all cores may be busy."""

TELLS_S = 15.0
"""Added to the timeout of a start, so that an engine that takes too long can report its last activity."""


@dataclass(eq=False)
class Replicas:
    """All replicas of a function, by name and by slot, the index of their allocation."""

    _cluster: ReplicaCluster
    _devices: ReplicaDevices
    _blueprint: Blueprint
    _call: Call
    _timeouts: TimeoutsSpec
    _recorder: Recorder

    def __post_init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._newest: list[Replica | None] = [None] * len(self.allocations)
        """The last replica at each slot."""
        self._launches = 0
        self._there: dict[str, Replica] = {}
        """Replicas that the cluster may still have, by name."""

    @property
    def kind(self) -> FunctionSpec:
        return self._blueprint.kind

    @property
    def function(self) -> str:
        return self._blueprint.kind.name

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return self._blueprint.allocations

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    def at(self, slot: int) -> Replica | None:
        newest = self._newest[slot]
        return newest if newest is not None and newest.state.holds_device else None

    def slot_of(self, replica: Replica) -> int:
        return next(slot for slot, allocation in enumerate(self.allocations) if allocation is replica.allocation)

    def places(self, replica: Replica) -> list[str]:
        """Return the cluster-wide names of a replica's devices."""
        return self._devices.places(replica.allocation)

    def must_come(self, slot: int) -> bool:
        """Return whether a replica at a slot would wait for a node that is not in the cluster yet."""
        return self._devices.must_come(self.allocations[slot])

    def replicas(self) -> tuple[Replica, ...]:
        """Return the replicas that hold devices, in the order of their starts."""
        return tuple(r for r in self._replicas.values() if r.state.holds_device)

    def shared(self) -> tuple[Replica, ...]:
        """Return the replicas that the run shares with others, also those that it has left."""
        return tuple(replica for replica in self._replicas.values() if replica.shared is not None)

    def serving(self) -> tuple[Replica, ...]:
        return tuple(r for r in self._replicas.values() if r.state is ReplicaState.SERVING)

    @property
    def lost(self) -> int:
        """Number of replicas given up while needed, since the attempt started."""
        return sum(replica.lost for replica in self._replicas.values())

    # -- starting

    async def start_one(self, slot: int) -> Replica:
        """Acquire devices, start a replica at a slot, and wait until it is up (STALE).

        Raises FleetError if the slot is taken, its devices do not arrive, or the start fails. Errors that the user can
        correct are raised unchanged.
        """
        await self.remove_dead()
        replica = self._launch(slot)
        name = replica.name
        try:
            replica.mark_waiting()
            bound = await self._devices.acquire(replica.allocation, name, replica.give_up)
            replica.mark_devices_acquired()
            handle = await self._cluster.deploy(
                name,
                self._blueprint.deployment,
                [self._blueprint.settings(bound)],
                bound.devices[0].node,
                stop_s=self._timeouts.drain_s,
            )
            await self._cluster.wait_running(name, self._timeouts.start_s + TELLS_S)
            try:
                reply = await asyncio.wait_for(handle.call("describe", self._call), self._timeouts.call_s)
            except HandleLost as error:
                raise ReplicaLost(f"{name} was lost as soon as it was up: {error}") from error
            except TimeoutError:
                raise CallTimeout(f"waited {self._timeouts.call_s:.0f} s for the first answer of {name}") from None
            replica.check_kept()
            replica.mark_up(handle, reply.value)
            if reply.value.log:
                log.info("%s is up; engine log: %s on %s", name, reply.value.log, reply.value.host)
            self._devices.finish_start(name)
        except BaseException:
            await self._call_off(replica)
            raise
        return replica

    async def _call_off(self, replica: Replica) -> None:
        """Remove a replica whose start failed or was cancelled, or that failed to fall asleep."""
        replica.mark_ended()
        await asyncio.shield(self._remove([replica.name]))

    async def _remove(self, names: Sequence[str]) -> None:
        """Stop replicas, and release devices that no other replica uses."""
        for name in names:
            self._there.pop(name, None)
        await self._cluster.delete(names)
        await self._devices.release(*names)

    def _launch(self, slot: int) -> Replica:
        if self.at(slot) is not None:
            raise FleetError(
                f"no device is free for another {self.function} replica: {len(self.replicas())} of "
                f"{len(self.allocations)} are running"
            )
        # Names are never reused, so that a late answer cannot be mistaken for another replica's.
        name = self._name(self._launches)
        self._launches += 1
        return self._new(name, slot)

    def _new(self, name: str, slot: int) -> Replica:
        replica = Replica(name, self.function, self.allocations[slot], self._recorder)
        self._replicas[name] = self._there[name] = self._newest[slot] = replica
        return replica

    def _name(self, number: object) -> str:
        return f"{self._call.run_id}-{self.function}-{number}"

    # -- adoption

    async def adopt(self, names: Sequence[str], call: Call, held_until_s: Mapping[str, float]) -> None:
        """Adopt replicas of an earlier attempt of the run; stop those with other settings or on devices that the run no
        longer has. `held_until_s`: end of the last recorded holding, by incarnation."""
        prefix = self._name("")
        of_run = [name for name in names if name.startswith(prefix)]
        self._launches = max([int(name.removeprefix(prefix)) + 1 for name in of_run], default=self._launches)
        await gather_or_cancel(*(self._adopt(name, call, held_until_s) for name in of_run))

    async def _adopt(self, name: str, call: Call, held_until_s: Mapping[str, float]) -> None:
        handle = self._cluster.handle(name)
        try:
            reply = await asyncio.wait_for(handle.call("describe", call), PROBE_S)
        except Exception as error:  # after any fault, the replica can be replaced
            log.warning("%s of an earlier attempt does not answer; stopping it: %r", name, error)
            await self._cluster.delete([name])
            return
        info: ReplicaInfo = reply.value
        taken = {id(replica.allocation) for replica in self.replicas()}
        for slot, allocation in enumerate(self.allocations):
            bound = self._devices.bound(allocation)
            if bound is None or id(allocation) in taken:
                continue
            if settings_key(self._blueprint.settings(bound)) == info.settings_key:
                replica = self._new(name, slot)
                replica.mark_adopted(handle, info, held_until_s.get(info.incarnation))
                self._devices.add_user(allocation, name, replica.give_up)
                log.info("adopted %s of an earlier attempt", name)
                return
        log.info("%s of an earlier attempt has other settings or devices; stopping it", name)
        await self._cluster.delete([name])

    # -- lost replicas

    async def probe_all(self, call: Call) -> None:
        """Probe all replicas, and give up those that do not answer."""
        await gather_or_cancel(*(self._probe(replica, call) for replica in self.replicas() if replica.info))

    async def _probe(self, replica: Replica, call: Call) -> None:
        try:
            replica.info = await replica.call("describe", call, timeout_s=PROBE_S, waiting_for="a sign of life")
        except ReplicaLost:
            pass  # given up already
        except CallTimeout as silence:
            replica.give_up(str(silence))

    async def remove_dead(self) -> None:
        """Delete lost replicas, so that Serve does not restart them and their allocations are free: also those that
        were draining, waking or asleep, and count as retired."""
        if remains := [name for name, replica in self._there.items() if not replica.state.holds_device]:
            await self._remove(remains)

    # -- stopping

    async def stop(self, *replicas: Replica) -> None:
        """Drain and stop replicas, and wait until their processes are gone and the devices free. Idempotent. Replicas
        of a newer attempt of the run are not stopped."""
        await self.remove_dead()
        running = [replica for replica in replicas if replica.state.holds_device]
        for replica in running:
            replica.drain()
        if self._cluster.lost:
            for replica in running:
                replica.mark_ended()
            return
        ours = await gather_or_cancel(*(self._say_stop(replica) for replica in running))
        names = [replica.name for replica, is_ours in zip(running, ours, strict=True) if is_ours]
        await self._remove(names)
        for replica in running:
            self._there.pop(replica.name, None)
            replica.mark_ended()

    async def _say_stop(self, replica: Replica) -> bool:
        """Let a replica stop its own processes before it is killed. Return False if it belongs to a newer attempt."""
        if replica.state not in (ReplicaState.DRAINING, ReplicaState.SLEEPING) or replica.info is None:
            return True
        try:
            wait_s, what = self._timeouts.drain_s, "an orderly stop"
            replica.shared = await replica.call("stop", self._call, timeout_s=wait_s, waiting_for=what)
        except StaleCall:
            return False
        except (ReplicaLost, CallTimeout) as error:
            log.warning("%s did not stop by itself; killing it: %s", replica.name, error)
        return True
