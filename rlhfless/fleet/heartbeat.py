"""Renew the leases of all replicas, and give up replicas that do not answer.

A replica whose lease is not renewed releases its devices, so a killed driver leaves nothing behind. A replica that does
not answer for the length of a lease, even with an open port, is given up, and pending calls to it fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.calls import Call, StaleCall
from rlhfless.util.clock import monotonic_s

HEARTBEATS_PER_LEASE = 4
"""Heartbeats per lease: high enough to tolerate one or two lost heartbeats."""


class LeasedDevices(Protocol):
    """The devices of a run (rlhfless.fleet.run_devices.RunDevices)."""

    all_up: asyncio.Event
    """Set when no user is starting any more, and the leases must be renewed at once."""

    async def renew(self) -> None:
        """Renew the lease of the devices. Raises StaleCall."""


class LeaseRenewal:
    """Renews the leases of replicas and devices until it is cancelled, or a newer attempt of the run owns them."""

    def __init__(
        self,
        pools: Sequence[ReplicaPool],
        devices: LeasedDevices,
        call: Call,
        lease_s: float,
        beaten: Callable[[], None],
    ) -> None:
        """`beaten` is called after each round."""
        self._pools = pools
        self._devices = devices
        self._call = call
        self._lease_s = lease_s
        self._beaten = beaten
        self._heard_s: dict[str, float] = {}

    async def run(self) -> None:
        period_s = self._lease_s / HEARTBEATS_PER_LEASE
        while True:
            began_s = monotonic_s()
            replicas = [replica for pool in self._pools for replica in pool.replicas() if replica.info]
            try:
                await asyncio.gather(self._devices.renew(), *(self._renew(each, period_s) for each in replicas))
            except StaleCall:
                return  # the driver's next call is refused with the reason
            self._beaten()
            left_s = max(0.0, period_s - (monotonic_s() - began_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._devices.all_up.wait(), left_s)
            self._devices.all_up.clear()

    async def _renew(self, replica: Replica, period_s: float) -> None:
        """Renew a replica's lease; give up the replica if it has been silent for longer than a lease. Raises
        StaleCall."""
        heard_s = self._heard_s.setdefault(replica.incarnation, monotonic_s())
        try:
            replica.shared = await replica.call("renew", self._call, timeout_s=period_s, waiting_for="a sign of life")
            self._heard_s[replica.incarnation] = monotonic_s()
        except CallTimeout:
            silent_s = monotonic_s() - heard_s
            if silent_s >= self._lease_s:
                replica.give_up(f"no sign of life for {silent_s:.0f} s (recovery.lease_s)")
        except ReplicaLost:
            pass  # given up already
