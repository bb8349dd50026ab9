"""The replicas of one function. A static fleet is a pool that is never asked to change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayTaskError

from rlhfless.fleet.cluster import Cluster, FleetError
from rlhfless.fleet.replica import CallTimeout, Recorder, Replica, ReplicaLost
from rlhfless.fleet.tasks import together
from rlhfless.functions.base import Call, ReplicaInfo, StaleCall, settings_key
from rlhfless.records import FunctionName, PublishedWeights, ReplicaState, WeightVersion, Work
from rlhfless.scaling.lifecycle import Membership
from rlhfless.scaling.placement import Seat
from rlhfless.spec import TimeoutsSpec

log = logging.getLogger(__name__)

PROBE_S = 10.0
"""Longest wait for an answer that costs a replica nothing. Long, because all cores may be at work."""


@dataclass(frozen=True)
class Blueprint:
    """How to build a function's replicas."""

    function: FunctionName
    deployment: type
    settings: Callable[[Seat], Any]
    """The deployment's settings for a replica in a seat."""
    seats: tuple[Seat, ...]
    """Where replica 0, 1, ... sit; as many as there may be at a time."""
    takes_seat: bool = True
    """False: the replica's parts ask Ray for the seat themselves (the learner's ranks)."""


class Pool:
    """Start, look up, sync, drain and stop the replicas of one function."""

    def __init__(
        self, cluster: Cluster, blueprint: Blueprint, call: Call, timeouts: TimeoutsSpec, recorder: Recorder
    ) -> None:
        self._cluster = cluster
        self._blueprint = blueprint
        self._call = call
        self._timeouts = timeouts
        self._recorder = recorder
        self._replicas: dict[str, Replica] = {}
        self._launches = 0
        self._buried: set[str] = set()
        self._preparing: set[str] = set()
        self._readying = asyncio.Lock()
        self.membership = Membership()
        """Its epoch goes up at every change of the pool."""

    @property
    def function(self) -> FunctionName:
        return self._blueprint.function

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Where replicas may sit, one in each."""
        return self._blueprint.seats

    def at(self, number: int) -> Replica | None:
        """The replica that holds a seat."""
        seat = self.seats[number]
        return next((replica for replica in self.replicas() if replica.seat is seat), None)

    def replicas(self) -> tuple[Replica, ...]:
        """All that hold a device, in the order in which they were started."""
        return tuple(r for r in self._replicas.values() if r.state.holds_device)

    def serving(self) -> tuple[Replica, ...]:
        """Those that may get traffic."""
        return tuple(r for r in self._replicas.values() if r.state == ReplicaState.SERVING)

    @property
    def lost(self) -> int:
        """Replicas that were given up while they were needed, since the pool was made."""
        return sum(replica.lost for replica in self._replicas.values())

    def up(self) -> tuple[Replica, ...]:
        """Those that can be given weights: up, and done with what they had to do first."""
        alive = (ReplicaState.STALE, ReplicaState.SERVING)
        return tuple(r for r in self._replicas.values() if r.state in alive and r.name not in self._preparing)

    async def add(
        self, prepare: Callable[[Replica], Awaitable[object]] | None = None, seat: int | None = None
    ) -> Replica:
        """Start one more replica, in the first free seat or in the one asked for; returns when it is up (STALE), and
        prepared.

        Raises FleetError if the seat, or every seat, is taken or the start fails, or what `prepare` raises.
        """
        await self.bury()
        replica = self._launch(seat)
        name, sits = replica.name, replica.seat
        try:
            handle = await self._cluster.deploy(
                name,
                self._blueprint.deployment,
                [self._blueprint.settings(sits)],
                sits if self._blueprint.takes_seat else None,
                stop_s=self._timeouts.drain_s,
            )
            await self._cluster.wait_running(name, self._timeouts.start_s)
            try:
                reply = await asyncio.wait_for(handle.describe.remote(self._call), self._timeouts.call_s)
            except RayTaskError as error:
                raise error.cause from error  # Ray's own text is the remote traceback
            self._preparing.add(name)
            replica.is_up(handle, reply.value)
            if prepare is not None:
                await prepare(replica)
        except BaseException:
            replica.gone()
            await asyncio.shield(self._cluster.delete([name]))
            raise
        finally:
            self._preparing.discard(name)
        return replica

    async def ensure(self, count: int) -> list[Replica]:
        """Start replicas until there are `count`, all at the same time; returns those that were started."""
        missing = count - len(self.replicas())
        return await together(*(self.add() for _ in range(missing)))

    async def adopt(self, names: Sequence[str], call: Call) -> None:
        """Take over replicas that an earlier driver of the run has left; those that do not fit are stopped."""
        prefix = self._name("")
        mine = [name for name in names if name.startswith(prefix)]
        self._launches = max([int(name.removeprefix(prefix)) + 1 for name in mine], default=self._launches)
        await together(*(self._adopt(name, call) for name in mine))

    async def _adopt(self, name: str, call: Call) -> None:
        handle = self._cluster.handle(name)
        try:
            reply = await asyncio.wait_for(handle.describe.remote(call), PROBE_S)
        except Exception as error:  # whatever ails it, it can be replaced
            log.warning("%s of an earlier attempt does not answer and is stopped: %r", name, error)
            await self._cluster.delete([name])
            return
        info: ReplicaInfo = reply.value
        taken = {id(replica.seat) for replica in self.replicas()}
        for seat in self._blueprint.seats:
            if id(seat) not in taken and settings_key(self._blueprint.settings(seat)) == info.settings_key:
                replica = self._replicas[name] = Replica(name, self.function, seat, self._recorder, self._changed)
                replica.is_adopted(handle, info)
                log.info("%s of an earlier attempt was taken over", name)
                return
        log.info("%s of an earlier attempt has other settings and is stopped", name)
        await self._cluster.delete([name])

    async def weed(self, call: Call) -> None:
        """Ask all replicas for a sign of life, and give up those that have none."""
        await together(*(self._weed(replica, call) for replica in self.replicas() if replica.info))

    async def _weed(self, replica: Replica, call: Call) -> None:
        try:
            replica.info = await replica.call("describe", call, timeout_s=PROBE_S, waiting_for="a sign of life")
        except ReplicaLost:
            pass  # given up already
        except CallTimeout as silence:
            replica.give_up(str(silence))

    async def bury(self) -> None:
        """Remove what is left of lost replicas, so that Serve does not revive them and their seats are free."""
        dead = [name for name, replica in self._replicas.items() if replica.state == ReplicaState.DEAD]
        remains = [name for name in dead if name not in self._buried]
        self._buried.update(remains)
        await self._cluster.delete(remains)

    def _name(self, number: object) -> str:
        return f"{self._call.run_id}-{self.function}-{number}"

    def _launch(self, number: int | None = None) -> Replica:
        wanted = range(len(self.seats)) if number is None else (number,)
        free = [self.seats[i] for i in wanted if self.at(i) is None]
        if not free:
            raise FleetError(
                f"no device is free for another {self.function} replica: {len(self.replicas())} of "
                f"{len(self.seats)} are running"
            )
        # Names are never used twice, so that a late answer cannot be taken for another replica's.
        name = self._name(self._launches)
        self._launches += 1
        replica = Replica(name, self.function, free[0], self._recorder, self._changed)
        self._replicas[name] = replica
        return replica

    async def ready(self) -> Replica:
        """The function's one replica, started if it is not there: the cold start is in the ledger.

        For functions without weights of the run (scoring, reference, learner).
        """
        async with self._readying:
            await self.ensure(1)
        replica = self.replicas()[0]
        if replica.state == ReplicaState.STALE:
            version = WeightVersion(self._call.run_id, self._call.attempt, 0, "own")
            replica.ask(version)
            replica.loaded(version)
        return replica

    async def sync_one(self, replica: Replica, published: PublishedWeights, call: Call) -> None:
        """Load a version into one replica: the one door to SERVING. Does nothing if it serves it already.

        Raises WeightCheckFailed, CallTimeout, or ReplicaLost.
        """
        replica.ask(published.version)
        if replica.state == ReplicaState.SERVING:
            return
        await replica.call(
            "load",
            call,
            published,
            timeout_s=self._timeouts.sync_s,
            waiting_for=f"the weights of step {published.version.step}",
            work=Work.LOAD_WEIGHTS,
        )
        # Another sync may have been waiting for the same load, as beside the start of an actor; or it was drained.
        if replica.state is ReplicaState.STALE:
            replica.loaded(published.version)

    async def stop(self, *replicas: Replica) -> None:
        """Drain and stop replicas; returns when their processes are gone and the devices free. Idempotent.

        A replica that a newer attempt of the run has taken over is left to it.
        """
        await self.bury()
        running = [replica for replica in replicas if replica.state.holds_device]
        for replica in running:
            replica.drain()
        if self._cluster.lost:
            for replica in running:
                replica.gone()
            return
        ours = await together(*(self._say_stop(replica) for replica in running))
        names = [replica.name for replica, is_ours in zip(running, ours, strict=True) if is_ours]
        await self._cluster.delete(names)
        for replica in running:
            replica.gone()

    async def _say_stop(self, replica: Replica) -> bool:
        """Let a replica end its own processes first. One that cannot any more is simply killed after this.

        Returns False if it is not ours any more.
        """
        if replica.state != ReplicaState.DRAINING or replica.info is None:
            return True
        try:
            await replica.call("stop", self._call, timeout_s=self._timeouts.drain_s, waiting_for="an orderly stop")
        except StaleCall:
            return False
        except (ReplicaLost, CallTimeout) as error:
            log.warning("%s did not stop by itself and is killed: %s", replica.name, error)
        return True

    def _changed(self, replica: Replica) -> None:
        if replica.info is not None:
            self.membership = self.membership.update(replica.incarnation, replica.state)
