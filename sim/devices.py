"""The devices of a simulated cluster: who holds them, and when they are there.

node    a node is provisioned once, in `node_s`; that wait is not billed
lease   a device that was given back, and is no longer paid for, is back after `RentalTerms.reacquire_s`
spot    another machine replaces an interrupted one after `node_s`
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from rlhfless.scaling.placement import Allocation
from rlhfless.sim.setup import Setup
from rlhfless.util.clock import unix_s

ROUNDING_S = 1e-6


class SimulatedDevices:
    """The devices of a run: a node is provisioned once, and a device that was given back takes a while to return."""

    def __init__(self, setup: Setup) -> None:
        self._terms = setup.terms
        self._node_s = setup.node_s
        self._node_of = {
            device.name: slot_setup.node for slot_setup in setup.slot_setups for device in slot_setup.allocation.devices
        }
        beside = [slot_setup.allocation for slot_setup in setup.slot_setups if slot_setup.beside]
        self._at_once = {device.name for allocation in beside for device in allocation.devices}
        """Devices, such as CPU cores, that are always there."""
        self._users: dict[str, set[str]] = {}
        """By device."""
        self._since_s: dict[str, float] = {}
        self._free_s: dict[str, float] = {}
        self._there_s: dict[str, float] = {}
        """By node: when it is there."""
        self._not_before_s: dict[str, float] = {}
        """By device: when the machine that replaces an interrupted one is there."""
        self._lost: dict[str, Any] = {}
        self.all_up = asyncio.Event()
        """See rlhfless.fleet.heartbeat.LeasedDevices."""

    async def acquire(self, allocation: Allocation, user: str, lost: Any) -> Allocation:
        """Wait for the devices. The wait is not billed."""
        now_s, names = unix_s(), [device.name for device in allocation.devices]
        back = [name for name in names if name in self._free_s and name not in self._at_once]
        gone = [name for name in back if now_s > self._paid_until_s(name)]
        begin_s = now_s + (self._terms.reacquire_s if gone else 0.0)
        for name in names:
            node = self._node_of[name]
            begin_s = max(begin_s, self._there_s.setdefault(node, begin_s + self._node_s))
            begin_s = max(begin_s, self._not_before_s.get(name, 0.0))
        for name in names:
            if not self._users.setdefault(name, set()) and (name not in self._since_s or name in gone):
                self._since_s[name] = begin_s
            self._users[name].add(user)
            self._free_s.pop(name, None)
        self._lost[user] = lost
        if begin_s > now_s:
            await asyncio.sleep(begin_s - now_s)
        return allocation

    def interrupted(self, user: str, allocation: Allocation) -> None:
        """Take the user's machine away; another one is there after `node_s`."""
        for device in allocation.devices:
            self._not_before_s[device.name] = unix_s() + self._node_s
        if (lost := self._lost.pop(user, None)) is not None:
            lost("its machine was taken away")

    def _paid_until_s(self, name: str) -> float:
        free_s = self._free_s[name]
        return max(self._terms.paid_until_s(self._since_s[name], free_s), free_s) + ROUNDING_S

    def reserved(self, allocations: Sequence[Allocation], user: str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def finish_start(self, user: str) -> None:
        self.all_up.set()

    async def renew(self) -> None:
        """See rlhfless.fleet.heartbeat.LeasedDevices. Devices of this run are never lost."""

    @property
    def in_use(self) -> list[str]:
        """The devices that a replica holds."""
        return [name for name, users in self._users.items() if users]

    def must_come(self, allocation: Allocation) -> bool:
        """Return whether a replica would wait for a machine that has not been provisioned yet."""
        return any(self._there_at_s(device.name) > unix_s() for device in allocation.devices)

    def _there_at_s(self, name: str) -> float:
        first_s = self._there_s.get(self._node_of[name], math.inf if self._node_s else 0.0)
        return max(first_s, self._not_before_s.get(name, 0.0))

    def bound(self, allocation: Allocation) -> Allocation:
        return allocation

    async def release(self, *users: str) -> None:
        """Give back the devices of these users."""
        now_s, gone = unix_s(), set(users)
        for name, of in self._users.items():
            if of and not (of - gone):
                self._free_s[name] = now_s
            of -= gone
