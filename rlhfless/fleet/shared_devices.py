"""The turn of a run on devices that it shares with other runs: taken from the reservation manager, and passed on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlhfless.fleet.protocols import FleetError, NoDevices
from rlhfless.fleet.run_devices import SAY_S, RunDevices
from rlhfless.scaling.placement import Allocation
from rlhfless.telemetry.sinks import FOR_DEVICES
from rlhfless.util.clock import monotonic_s

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Delay between calls to an unreachable reservation manager."""


class SharedDevices:
    """The run's turn on the devices of functions that share them with other runs."""

    def __init__(self, devices: RunDevices, allocations: Sequence[Allocation]) -> None:
        self._devices = devices
        self._allocations = allocations
        self._owned: dict[str, str] = {}
        """The reservation of each device group on which it is the run's turn. Devices that were lost and reacquired
        have another reservation."""

    async def take(self, within_s: float | None = None) -> None:
        """Wait for the run's turn on all of the devices. Idempotent. Raises NoDevices after `within_s`, by default
        `timeouts.devices_s`."""
        held = self._held()
        if held.items() <= self._owned.items():
            return
        limit_s = self._devices.timeouts.devices_s if within_s is None else within_s
        groups, began_s = sorted(held), monotonic_s()
        owners = await self._devices.ask("turn", groups, 0.0)
        while owners:
            what = f"{FOR_DEVICES}: its turn on {', '.join(groups)}, where {', '.join(owners)} works"
            left_s = limit_s - (monotonic_s() - began_s)
            if left_s <= 0:
                raise NoDevices(f"{limit_s:.0f} s of {what} (timeouts.devices_s)")
            with self._devices.shown(what):
                owners = await self._devices.ask("turn", groups, min(left_s, SAY_S))
        self._owned = held

    async def pass_on(self) -> None:
        """Pass the turn on. The run must have nothing awake on the devices. Idempotent. If the manager is unreachable,
        the turn stays wanted, and a later call passes it on."""
        self._owned = {}
        if held := self._held():
            try:
                await self._devices.ask("pass_on", sorted(held))
            except FleetError as error:
                log.warning("the run's turn was not passed on yet: %s", error)

    async def wait_wanted(self) -> None:
        """Wait until another run wants one of the devices. Raises StaleCall."""
        while True:
            try:
                if await self._devices.ask("wanted", sorted(self._held()), SAY_S):
                    return
            except FleetError as error:
                log.warning("requests of other runs for these devices are unknown for now: %s", error)
                await asyncio.sleep(RETRY_S)

    def _held(self) -> dict[str, str]:
        return self._devices.reservations_of(self._allocations)
