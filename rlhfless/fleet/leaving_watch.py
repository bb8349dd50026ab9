"""Watch nodes, and make replicas leave those that are being drained.

The signal that a node leaves is its drain state in Ray's GCS. It is set by `ray drain-node`, Ray's autoscaler, the
preStop hook of a pod (rlhfless.fleet.leave_node), and the service's Ray host, for nodes that Kubernetes is about to
remove. Ray places nothing new on such a node, and exits there when nothing is left, so a run acquires no devices on it.
A node that disappears before everything has moved counts as dead, but no results are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.leave_node import drain
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Interval for reading leaving nodes from GCS. Clouds give at least 30 s of notice, and an actor's samples migrate in a
second."""


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


async def show_nodes(cluster: Cluster, kind: str, show: Callable[[Sequence[int]], None]) -> None:
    """Show the number of devices of a kind of each node that stays, every LOOK_S until cancelled."""
    while True:
        try:
            counts = [node.count(kind) for node in await cluster.nodes(kind)]
        except (RayError, OSError, RuntimeError) as error:
            log.info("the nodes are unknown, because the cluster does not answer: %s", error)
        else:
            show([count for count in counts if count])
        await asyncio.sleep(LOOK_S)
