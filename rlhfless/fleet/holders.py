"""The processes that hold devices for a run, so that Ray and a cluster autoscaler see what the run needs.

A *holder* is a small Ray actor that asks Ray for whole devices of one node and says which ones it got. One that pends
is the demand that an autoscaler sees. Replicas ask Ray for nothing: they are put on the holder's node and are told
which devices to use.

The run's *keeper* is the detached actor that owns its holders. It outlives the driver, so that a resumed driver finds
the devices still held, and ends by itself when its lease does; the holders, also those that pend, end with it. The
attempt number fences off a driver that was believed dead.

CPU cores: Ray counts them, and does not say which. A holder locks a file per core, so that the runs of one user on one
machine get different cores; the kernel gives the locks back when the holder ends, however it ends.

Imports little: an actor that only holds something should be there at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayActorError

from rlhfless.folders import private
from rlhfless.functions.lease import Lease, LeaseTerms

NAMESPACE = "rlhfless"
"""Ray's namespace of the keepers."""

HEAD_RESOURCE = "node:__internal_head__"
"""What Ray gives the head node: keepers are there, because no run survives its loss anyway."""

DIED = (RayActorError, OutOfMemoryError, ActorUnschedulableError)
"""What a call of an actor that has died raises: Ray's errors for one that it killed for memory, and for one whose node
went before it was there, are no RayActorErrors."""

LOOK_S = 5.0
"""How often a keeper looks whether its lease has ended."""


class StaleHolder(RuntimeError):
    """A driver of an older attempt asked."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a holder asks Ray for."""

    kind: str
    """Key of the price book."""
    devices: int
    gpu: bool
    """GPUs, or CPU cores."""
    selectors: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Labels of the node that are wanted, as pairs; further ones are tried in order if it has no room."""

    def is_met_by(self, other: Demand) -> bool:
        """Devices that were taken for the other demand do for this one, wherever they are."""
        return (self.kind, self.devices) == (other.kind, other.devices)

    def options(self) -> dict[str, Any]:
        """Ray's options for the holder."""
        amount = {"num_cpus": 0, "num_gpus": self.devices} if self.gpu else {"num_cpus": self.devices}
        first, *others = [dict(labels) for labels in self.selectors] or [{}]
        options: dict[str, Any] = {**amount, "max_restarts": 0}
        if first:
            options["label_selector"] = first
        if others:
            options["fallback_strategy"] = [{"label_selector": labels} for labels in others]
        return options


@dataclass(frozen=True, slots=True)
class Held:
    """Devices that a holder has."""

    holder: str
    """Ray's id of the holder: another one may have got other devices."""
    node: str
    """Ray's id of the node."""
    address: str
    local_ids: tuple[str, ...]
    """Numbers of cores; or entries of CUDA_VISIBLE_DEVICES, composed with the mask that was already on the node."""


class Holder:
    """Holds devices by being there."""

    def __init__(self, demand: Demand) -> None:
        self._locks = [] if demand.gpu else lock_cores(demand.devices, os.sched_getaffinity(0), core_folder())
        self._gpu = demand.gpu

    def held(self) -> Held:
        """What it holds."""
        context = ray.get_runtime_context()
        ids = sorted(context.get_accelerator_ids()["GPU"], key=_in_order) if self._gpu else map(str, dict(self._locks))
        node, holder = context.get_node_id(), context.get_actor_id()
        return Held(str(holder), node, ray.util.get_node_ip_address(), tuple(ids))


def _in_order(local_id: str) -> tuple[int, str]:
    return (int(local_id), "") if local_id.isdecimal() else (0, local_id)


def core_folder() -> Path:
    """The folder of this user's core locks, for the user alone. Raises NotPrivate if it belongs to another."""
    return private(Path(tempfile.gettempdir()) / f"rlhfless-cores-{os.getuid()}")


def lock_cores(wanted: int, cores: Collection[int], folder: Path) -> list[tuple[int, int]]:
    """Lock so many of the cores, the lowest first; returns them with the open files that keep them locked.

    Where other runs have too many of them, numbers above all cores stand in: nothing can be pinned to such a core, so
    the scheduler shares the machine out.
    """
    locked: list[tuple[int, int]] = []
    for core in chain(sorted(cores), count(max(cores, default=-1) + 1)):
        if len(locked) == wanted:
            break
        file = os.open(folder / f"core-{core}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        locked.append((core, file))
    return locked


class Keeper:
    """Owns the holders of one run. All methods are idempotent, and raise StaleHolder for an older attempt.

    Their `lease_s` says how long the keeper waits for the next call before it gives everything back.
    """

    def __init__(self, lease_s: float) -> None:
        self._attempt = 0
        self._holders: dict[str, tuple[Demand, Any]] = {}
        # An actor that ends by itself: Ray ends what it owns.
        self._lease = Lease(LeaseTerms(first_s=lease_s, renewed_s=LOOK_S), lambda: os._exit(0))

    def _admit(self, attempt: int, lease_s: float) -> None:
        if attempt < self._attempt:
            raise StaleHolder(f"attempt {attempt} asks, but attempt {self._attempt} has taken over")
        self._attempt = attempt
        self._lease.renew(lease_s)

    async def hold(self, attempt: int, lease_s: float, group: str, demand: Demand, wait_s: float) -> Held | None:
        """What the group's holder has; None if it still pends after `wait_s`. One that is lost is made anew."""
        self._admit(attempt, lease_s)
        known = self._holders.get(group)
        if known is not None and not demand.is_met_by(known[0]):
            self._end(group)
            known = None
        if known is None:
            make: Any = ray.remote(**demand.options())  # type: ignore[call-overload]  # Ray's types know no labels
            known = self._holders[group] = (demand, make(Holder).remote(demand))
        try:
            return await asyncio.wait_for(known[1].held.remote(), wait_s)
        except (TimeoutError, ActorUnavailableError):
            return None
        except DIED:
            if self._holders.get(group) is known:
                self._end(group)
            return None

    async def held(self, attempt: int, lease_s: float, wait_s: float) -> dict[str, tuple[Demand, Held]]:
        """What all groups hold by now: holders that pend are given up."""
        self._admit(attempt, lease_s)
        known = dict(self._holders)
        answers = await asyncio.gather(
            *(self.hold(attempt, lease_s, group, demand, wait_s) for group, (demand, _) in known.items())
        )
        held_by_group = {
            group: (known[group][0], held) for group, held in zip(known, answers, strict=True) if held is not None
        }
        await self.release(attempt, lease_s, [group for group in known if group not in held_by_group])
        return held_by_group

    async def lost(self, attempt: int, lease_s: float, groups: Sequence[str], wait_s: float) -> list[str]:
        """Which of the groups have no living holder any more. One that does not answer in time may live."""
        self._admit(attempt, lease_s)

        async def is_lost(group: str) -> bool:
            if group not in self._holders:
                return True
            try:
                await asyncio.wait_for(self._holders[group][1].held.remote(), wait_s)
            except (TimeoutError, ActorUnavailableError):
                return False
            except DIED:
                return True
            return False

        gone = await asyncio.gather(*map(is_lost, groups))
        return [group for group, is_gone in zip(groups, gone, strict=True) if is_gone]

    async def release(self, attempt: int, lease_s: float, groups: Sequence[str]) -> None:
        """Give devices back, or take demands back. Unknown groups are fine."""
        self._admit(attempt, lease_s)
        for group in groups:
            self._end(group)

    def _end(self, group: str) -> None:
        if group in self._holders:
            ray.kill(self._holders.pop(group)[1])


def keeper_of(run_id: str, lease_s: float) -> Any:
    """The run's keeper, made if need be. Returns its handle at once."""
    make: Any = ray.remote(  # type: ignore[call-overload]  # Ray's types do not know every option
        name=run_id,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        resources={HEAD_RESOURCE: 0.0001},
    )
    return make(Keeper).remote(lease_s)


def keeper_left(run_id: str) -> Any | None:
    """The keeper that an earlier driver of the run has left, if it lives."""
    try:
        return ray.get_actor(run_id, namespace=NAMESPACE)
    except ValueError:
        return None
