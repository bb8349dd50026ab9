"""The engines of a fleet (`placement.share: adapters`), as the pool of one of its runs starts and stops them.

To the pool, an engine is a replica like any other. Here, its start means to join the engine on these devices, which is
started only if there is none, and its stop to leave it; the last run to leave deletes the engine. The reservation
manager says which run starts an engine (rlhfless.fleet.reservations.EngineClaim).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlhfless.fleet.handles import Handle, HandleLost, PendingReply
from rlhfless.fleet.protocols import FleetError, ReplicaCluster
from rlhfless.fleet.reservations import EngineClaim
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.calls import Call, FunctionBroken, StaleCall
from rlhfless.util.clock import monotonic_s

log = logging.getLogger(__name__)

CLAIM_S = 5.0
"""Longest wait in one call of the manager."""

JOIN_S = 20.0
"""Timeout for an engine that is up to let a run join, or leave. It is long, because all cores may be busy."""


class SharedHandle:
    """The handle of a replica's engine, which is known once the run has joined it; see Handle."""

    def __init__(self) -> None:
        self.target: Handle | None = None

    def call(self, method: str, *arguments: object, **keywords: object) -> PendingReply:
        return self._joined.call(method, *arguments, **keywords)

    def stream(self, method: str, *arguments: object) -> AsyncIterator[Any]:
        return self._joined.stream(method, *arguments)

    @property
    def _joined(self) -> Handle:
        if self.target is None:
            raise HandleLost("the run has not joined the engine yet")
        return self.target


class _Start:
    """A replica of the run, and what an engine for it would be."""

    def __init__(self, function: type, settings: Any, node: str, stop_s: float, group: str) -> None:
        self.function = function
        self.settings = settings
        self.node = node
        self.stop_s = stop_s
        self.group = group
        self.handle = SharedHandle()
        self.engine = ""


class SharedEngines:
    """Starts and deletes replicas by name; see ReplicaCluster."""

    def __init__(self, cluster: ReplicaCluster, devices: RunDevices, call: Call) -> None:
        self._cluster = cluster
        self._devices = devices
        self._call = call
        self._starts: dict[str, _Start] = {}

    @property
    def lost(self) -> bool:
        return self._cluster.lost

    async def deploy(
        self, name: str, function: type, arguments: Sequence[Any], node: str, *, stop_s: float
    ) -> SharedHandle:
        """Prepare to join an engine; see ReplicaCluster.deploy."""
        (settings,) = arguments
        start = _Start(function, settings, node, stop_s, self._devices.group_at(settings.binding))
        self._starts[name] = start
        return start.handle

    async def wait_running(self, name: str, timeout_s: float) -> None:
        """Join the engine on the replica's devices; start it if there is none, or if it is broken."""
        start, end_s, dead = self._starts[name], monotonic_s() + timeout_s, ""
        while True:
            claim: EngineClaim | None = await self._devices.ask("claim_engine", start.group, name, dead, CLAIM_S)
            if claim is None:
                raise FleetError(f"the devices of {name} were lost before it started")
            if claim.starts:
                await self._launch(start, claim, end_s - monotonic_s())
            if claim.starts or claim.up:
                start.handle.target, start.engine = self._cluster.handle(claim.engine), claim.engine
                try:
                    join = start.handle.call("join", self._call, start.settings.run)
                    await asyncio.wait_for(join, JOIN_S)
                    return
                except (HandleLost, FunctionBroken, TimeoutError) as error:
                    log.warning("%s cannot join %s; replacing it: %r", name, claim.engine, error)
                    dead = claim.engine
            if monotonic_s() > end_s:
                raise FleetError(f"waited {timeout_s:.0f} s for {name}: {claim.engine} did not start")

    async def _launch(self, start: _Start, claim: EngineClaim, timeout_s: float) -> None:
        """Start an engine, in place of the broken one."""
        if claim.before:
            await self._cluster.delete([claim.before])
        log.info("starting %s for %s", claim.engine, start.group)
        await self._cluster.deploy(claim.engine, start.function, [start.settings], start.node, stop_s=start.stop_s)
        await self._cluster.wait_running(claim.engine, timeout_s)
        await self._devices.ask("engine_up", claim.engine)

    def handle(self, name: str) -> Handle:
        """Return the handle of a replica of an earlier driver."""
        return self._cluster.handle(self._devices.engines[name][1])

    async def delete(self, names: Sequence[str]) -> None:
        """Leave the engines of these replicas, and delete those that no other run has. Unknown names are ignored."""
        await asyncio.gather(*map(self._leave, names))

    async def _leave(self, name: str) -> None:
        start = self._starts.pop(name, None)
        group, engine, handle = "", "", None
        if start is not None:
            group, engine, handle = start.group, start.engine, start.handle.target
        elif name in self._devices.engines:
            group, engine = self._devices.engines[name]
            handle = self._cluster.handle(engine)
        if not group or self.lost:
            return
        if handle is not None:
            try:
                await asyncio.wait_for(handle.call("stop", self._call), JOIN_S)
            except StaleCall:
                return  # a newer attempt of the run has it
            except (HandleLost, FunctionBroken, TimeoutError) as error:  # it has left already, or its lease will end
                log.debug("%s did not leave %s in order: %r", name, engine, error)
        try:
            last = await self._devices.ask("leave_engine", group)
        except StaleCall:
            return
        except FleetError as error:
            log.warning("%s not released in order; it ends with its lease: %s", engine, error)
            return
        if last:
            await self._cluster.delete([last])
