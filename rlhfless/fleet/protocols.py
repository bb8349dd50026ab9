"""What replicas need: a cluster that starts and deletes them, and the devices of their run.

A live run has a Ray cluster (rlhfless.fleet.cluster) and reserved devices (rlhfless.fleet.run_devices). A simulated run
has those of `rlhfless.sim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from rlhfless.fleet.handles import Handle
from rlhfless.scaling.placement import Allocation

Lost = Callable[[str], None]
"""Called with the reason when the devices of a replica are lost."""


class FleetError(RuntimeError):
    """A replica did not start, answer or stop as requested. The message names the replica, the wait and its length."""


class NoDevices(FleetError):
    """Devices did not become free in time. The message names them, what is free, and how long the run waited."""


class ReplicaCluster(Protocol):
    """Starts and deletes replicas by name."""

    @property
    def lost(self) -> bool:
        """Whether the cluster has ended, with all replicas. Calls would then never return."""

    async def deploy(self, name: str, function: type, arguments: Sequence[Any], node: str, *, stop_s: float) -> Handle:
        """Start one replica on a node, without waiting for it. `stop_s`: limit of its orderly stop."""

    def handle(self, name: str) -> Handle:
        """Return the handle of a running replica."""

    async def wait_running(self, name: str, timeout_s: float) -> None:
        """Wait until a replica can be called. Raises FleetError if it cannot start, or after `timeout_s`."""

    async def delete(self, names: Sequence[str]) -> None:
        """Stop replicas, and wait until they are gone. Unknown names are ignored."""


class ReplicaDevices(Protocol):
    """The devices of a run, which replicas acquire and release."""

    async def acquire(self, allocation: Allocation, user: str, lost: Lost) -> Allocation:
        """Acquire devices for `user` until `release`, and return the allocation with its devices bound. `lost` is
        called if they are lost. Raises NoDevices."""

    def reserved(self, allocations: Sequence[Allocation], user: str) -> AbstractAsyncContextManager[None]:
        """Hold devices that the run shares with others within the block. Raises as `acquire`."""

    def finish_start(self, user: str) -> None:
        """Record that a user has started."""

    async def release(self, *users: str) -> None:
        """Release the devices of replicas that have ended or never started, unless other replicas use them."""

    def bound(self, allocation: Allocation) -> Allocation | None:
        """Return the allocation with its devices bound; None if the run does not hold them."""

    def add_user(self, allocation: Allocation, user: str, lost: Lost) -> None:
        """Record that `user`, such as a replica of an earlier driver, uses devices that the run holds."""

    def must_come(self, allocation: Allocation) -> bool:
        """Return whether a replica there would wait for a new node."""

    def places(self, allocation: Allocation) -> list[str]:
        """Return the cluster-wide names of an allocation's devices."""
