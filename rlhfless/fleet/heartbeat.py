"""Watch replicas and nodes: renew the leases of all replicas, and make replicas leave nodes that are being drained.

A replica whose lease is not renewed releases its devices, so a killed driver leaves nothing behind. A replica that does
not answer for the length of a lease, even with an open port, is given up, and pending calls to it fail.

The signal that a node leaves is its drain state in Ray's GCS. It is set by `ray drain-node`, Ray's autoscaler, the
preStop hook of a pod (rlhfless.fleet.leave_node), and the service's Ray host, for nodes that Kubernetes is about to
remove. Ray places nothing new on such a node, and exits there when nothing is left, so a run acquires no devices on it.
A node that disappears before everything has moved counts as dead, but no results are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rlhfless.fleet.leave_node import drain
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.calls import Call, StaleCall
from rlhfless.util.clock import monotonic_s

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
"""Heartbeats per lease: high enough to tolerate one or two lost heartbeats."""

LOOK_S = 2.0
"""Interval for reading leaving nodes from GCS. Clouds give at least 30 s of notice, and an actor's samples migrate in a
second."""


class LeaseRenewal:
    """Renews the leases of replicas and devices until it is cancelled, or a newer attempt of the run owns them."""

    def __init__(
        self, pools: Sequence[ReplicaPool], devices: RunDevices, call: Call, lease_s: float, beaten: Callable[[], None]
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
            await replica.call("renew", self._call, timeout_s=period_s, waiting_for="a sign of life")
            self._heard_s[replica.incarnation] = monotonic_s()
        except CallTimeout:
            silent_s = monotonic_s() - heard_s
            if silent_s >= self._lease_s:
                replica.give_up(f"no sign of life for {silent_s:.0f} s (recovery.lease_s)")
        except ReplicaLost:
            pass  # given up already


def leaving_nodes() -> frozenset[str]:
    """Return the Ray ids of the nodes that are being drained."""
    return frozenset(state.get_draining_nodes())


def drain_nodes(leaving: Mapping[str, float]) -> None:
    """Drain the nodes at these addresses, except nodes that are already being drained.

    `leaving`: unix time at which each node leaves, by address; 0 if unknown. This process must have joined the cluster.
    """
    known = leaving_nodes()
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    for node in ray.nodes():
        address = node["NodeManagerAddress"]
        if node["Alive"] and address in leaving and node["NodeID"] not in known:
            drain(client, node["NodeID"], leaving[address], "its machine is about to go")


class LeavingWatch:
    """Makes pools leave the nodes that are being drained, until it is cancelled."""

    def __init__(self, pools: Sequence[ReplicaPool], call: Call) -> None:
        self._pools = pools
        self._call = call
        self._known: frozenset[str] = frozenset()

    async def run(self) -> None:
        while True:
            if ray.is_initialized():
                try:
                    await self.look()
                except (RayError, OSError, RuntimeError) as error:  # GCS is away, or restarts
                    log.info("leaving nodes are unknown, because the cluster does not answer: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        self.update(await asyncio.to_thread(leaving_nodes))

    def update(self, nodes: Collection[str]) -> None:
        """Set the nodes that the pools must leave."""
        for node in sorted(set(nodes) - self._known):
            log.info("node %s leaves the cluster", node)
        self._known = frozenset(nodes)
        for pool in self._pools:
            pool.leave_nodes(self._known, self._call)
