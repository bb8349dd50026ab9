"""Nodes that are about to leave the cluster: what a run has there moves before they go.

The one signal is the drain state of Ray's GCS. It is set by `ray drain-node`, by Ray's autoscaler, by the hook of a pod
that ends (rlhfless.fleet.leave_node), and by the service's host for nodes that Kubernetes is about to take away. Ray
places nothing new on such a node, and ends its Ray when nothing on it is held any more; so a run takes no devices on
it. A node that goes before everything has moved counts as dead, which loses nothing either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rlhfless.fleet.leave_node import drain
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.base import Call

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often GCS is asked: the shortest notice of a cloud is 30 s, and an actor hands its samples over in a second."""


def leaving_nodes() -> frozenset[str]:
    """Ray's ids of the nodes that are being drained."""
    return frozenset(state.get_draining_nodes())


def drain_nodes(leaving: Mapping[str, float]) -> None:
    """Drain the nodes at these addresses, which leave at these times (unix time; 0 if it is not known); nodes that are
    being drained already are left alone. This process has joined the cluster."""
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
        """Ask periodically."""
        while True:
            if ray.is_initialized():
                try:
                    await self.look()
                except (RayError, OSError, RuntimeError) as error:  # GCS is away, or starts again
                    log.info("the cluster does not say which nodes leave: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask once which nodes are being drained."""
        self.update(await asyncio.to_thread(leaving_nodes))

    def update(self, nodes: Collection[str]) -> None:
        """Have the pools leave these nodes, and no others."""
        for node in sorted(set(nodes) - self._known):
            log.info("node %s leaves the cluster", node)
        self._known = frozenset(nodes)
        for pool in self._pools:
            pool.leave_nodes(self._known, self._call)
