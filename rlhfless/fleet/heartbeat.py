"""The heartbeat between the driver and all replicas, in both directions.

A replica whose lease is not renewed gives its device back, so a driver that was killed leaves nothing behind. A replica
that does not answer for the length of a lease, even with an open port, is given up, and calls that wait for it end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.base import Call, StaleCall

BEATS_PER_LEASE = 4
"""High enough that one or two lost beats do no harm."""


class Heartbeat:
    """Beats until it is cancelled, or until a newer attempt of the run has taken the replicas over."""

    def __init__(
        self, pools: Sequence[ReplicaPool], devices: RunDevices, call: Call, lease_s: float, beaten: Callable[[], None]
    ) -> None:
        """`beaten` is called after each beat."""
        self._pools = pools
        self._devices = devices
        self._call = call
        self._lease_s = lease_s
        self._beaten = beaten
        self._heard_s: dict[str, float] = {}

    async def run(self) -> None:
        """Renew all leases periodically."""
        period_s = self._lease_s / BEATS_PER_LEASE
        while True:
            began_s = time.monotonic()
            replicas = [replica for pool in self._pools for replica in pool.replicas() if replica.info]
            beats = (self._beat(replica, period_s) for replica in replicas)
            results = await asyncio.gather(self._renew_devices(), *beats)
            if not all(results):
                return  # the driver's next call is refused, which says why it must stop
            self._beaten()
            left_s = max(0.0, period_s - (time.monotonic() - began_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._devices.all_up.wait(), left_s)
            self._devices.all_up.clear()

    async def _renew_devices(self) -> bool:
        """Returns False if the devices belong to a newer attempt."""
        try:
            await self._devices.renew()
        except StaleCall:
            return False
        return True

    async def _beat(self, replica: Replica, period_s: float) -> bool:
        """Returns False if the replica belongs to a newer attempt."""
        heard_s = self._heard_s.setdefault(replica.incarnation, time.monotonic())
        try:
            await replica.call("renew", self._call, timeout_s=period_s, waiting_for="a sign of life")
            self._heard_s[replica.incarnation] = time.monotonic()
        except CallTimeout:
            silent_s = time.monotonic() - heard_s
            if silent_s >= self._lease_s:
                replica.give_up(f"no sign of life for {silent_s:.0f} s (recovery.lease_s)")
        except ReplicaLost:
            pass  # given up already
        except StaleCall:
            return False
        return True
