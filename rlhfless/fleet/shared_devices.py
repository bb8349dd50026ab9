"""Devices that a run lends to other runs while its functions there sleep, and gets back for its next phase.

The manager of all runs that share devices (rlhfless.fleet.reservations) says whose turn it is. A run keeps it until
another run waits for it and its own phase on the devices is over: then its replicas fall asleep and it passes the turn
on. So a run that is alone on its devices never sleeps for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from rlhfless.fleet.cluster import FleetError
from rlhfless.fleet.run_devices import SAY_S, NoDevices, RunDevices
from rlhfless.scaling.placement import Allocation
from rlhfless.telemetry.progress import FOR_DEVICES

log = logging.getLogger(__name__)


AGAIN_S = 1.0
"""Between two questions to a keeper that cannot be reached."""


class SharedDevices:
    """The devices of functions that take turns; of these the ones that the run holds."""

    def __init__(self, devices: RunDevices, allocations: Sequence[Allocation]) -> None:
        self._devices = devices
        self._allocations = allocations
        self._owned: dict[str, str] = {}
        """The holder of each group on which it is the run's turn. Devices that were lost and taken again have another
        holder."""

    async def take(self, within_s: float | None = None) -> None:
        """Wait for the run's turn on all of them. Raises NoDevices if that takes longer than `within_s`, by default
        `timeouts.devices_s`."""
        held = self._held()
        if held.items() <= self._owned.items():
            return
        limit_s = self._devices.timeouts.devices_s if within_s is None else within_s
        groups, began_s = sorted(held), time.monotonic()
        owners = await self._devices.ask("turn", groups, 0.0)
        while owners:
            what = f"{FOR_DEVICES}: its turn on {', '.join(groups)}, where {', '.join(owners)} works"
            left_s = limit_s - (time.monotonic() - began_s)
            if left_s <= 0:
                raise NoDevices(f"{limit_s:.0f} s of {what} (timeouts.devices_s)")
            with self._devices.shown(what):
                owners = await self._devices.ask("turn", groups, min(left_s, SAY_S))
        self._owned = held

    async def pass_on(self) -> None:
        """Pass the turn on; nothing of the run is awake on the devices. If the keeper cannot be reached it is told
        later: it goes on saying that they are wanted."""
        self._owned = {}
        if held := self._held():
            try:
                await self._devices.ask("pass_on", sorted(held))
            except FleetError as error:
                log.warning("the run's turn was not passed on, and will be: %s", error)

    async def wait_wanted(self) -> None:
        """Wait until another run waits for one of them. Raises StaleCall."""
        while not await self._asked_back():
            pass

    async def _asked_back(self) -> bool:
        try:
            return bool(await self._devices.ask("wanted", sorted(self._held()), SAY_S))
        except FleetError as error:
            log.warning("whether other runs wait for this run's devices is not known for now: %s", error)
            await asyncio.sleep(AGAIN_S)
            return False

    def _held(self) -> dict[str, str]:
        return self._devices.holders_of(self._allocations)
