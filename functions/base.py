"""The base of every function: its incarnation, fencing against old drivers, and replies that carry the work done.

A function is a Serve deployment with one replica. Serve revives a dead replica under the same name, so every reply
carries the *incarnation*, a random ID per process: an unknown incarnation is a new replica that has loaded nothing.
Calls carry (run, attempt, step); a replica refuses calls of an older attempt than the newest it has seen, so a
driver that was believed dead can do no harm. Without a call in time a replica's lease ends, and it releases its device;
the clock runs in a thread, so that a busy replica or a stuck event loop is watched too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from rlhfless.functions.calls import Call, CallUsage, ReplicaInfo, Reply, SharedNow, StaleCall, settings_key
from rlhfless.functions.devices import Planned, require_shareable
from rlhfless.functions.loopback import bind_replica_to_loopback
from rlhfless.records import SleepTier, Slept
from rlhfless.util.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound="Function")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings:
    """The settings of every function."""

    run_id: str
    lease: LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings(FunctionSettings):
    """The settings of every function with ranks."""

    rank_bindings: tuple[DeviceBinding, ...]
    """The devices of each rank."""
    call_timeout_s: float
    """Limit of a call to all ranks, and of each collective operation."""
    planned: Planned = field(default_factory=dict)
    """Planned bytes of one rank, by phase."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank among those of its function."""

    rank: int = 0
    ranks: int = 1
    address: str = ""
    """Where the ranks meet: `tcp://host:port`, or `file:///path`."""
    timeout_s: float = 60.0
    """Limit of the rendezvous and of each collective operation; torch's error names the operation."""


@dataclass(frozen=True, slots=True)
class CallResult(Generic[T]):
    """The value of a call and its work."""

    value: T
    usage: CallUsage = field(default_factory=CallUsage)


def admitted(
    body: Callable[Concatenate[F, Call, P], Awaitable[CallResult[T]]],
) -> Callable[Concatenate[F, Call, P], Coroutine[Any, Any, Reply[T]]]:
    """Decorate a method that drivers call: admit the call, run the body, and reply with its times and work."""

    @functools.wraps(body)
    async def method(self: F, call: Call, *arguments: P.args, **keywords: P.kwargs) -> Reply[T]:
        self.admit(call)
        start_s = time.time()
        worked = await body(self, call, *arguments, **keywords)
        return self.metered(self.reply(worked.value, start_s, worked.usage), call)

    return method


class Function:
    """Base of the deployments."""

    def __init__(self, settings: FunctionSettings) -> None:
        bind_replica_to_loopback()
        self.run_id = settings.run_id
        self.incarnation = uuid.uuid4().hex[:12]
        self._settings_key = settings_key(settings)
        self._attempt = 0
        self._unfit: UserError | None = None
        self._lease = Lease(settings.lease, self._abandoned)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep user errors from a constructor's loads; every call then raises them, the first being `describe`.

        Serve would keep only the text of a constructor's error and lose its type.
        """
        try:
            yield
        except UserError as error:
            self._unfit = error

    def admit(self, call: Call) -> None:
        """Admit a call. Raises StaleCall or the start's error."""
        if call.run_id != self.run_id:
            raise StaleCall(f"call of run {call.run_id!r}, but this replica belongs to {self.run_id!r}")
        if call.attempt < self._attempt:
            raise StaleCall(
                f"call of attempt {call.attempt} of run {self.run_id}, but attempt {self._attempt} has taken over"
            )
        self._attempt = call.attempt
        self._lease.renew()
        if self._unfit is not None:
            raise self._unfit

    async def describe(self, call: Call) -> Reply[ReplicaInfo]:
        """Describe this replica. Raises FunctionBroken if it can no longer work."""
        self.admit(call)
        return self.reply(self.info(), time.time())

    async def renew(self, call: Call) -> Reply[SharedNow | None]:
        """Renew the replica's lease; return the state of a replica that several runs share."""
        self.admit(call)
        return self.reply(None, time.time())

    def reply(self, value: T, start_s: float, usage: CallUsage | None = None) -> Reply[T]:
        """Wrap the result of a body that ends now."""
        return Reply(self.incarnation, value, start_s, time.time(), usage or CallUsage())

    def metered_s(self, call: Call) -> float | None:  # noqa: ARG002
        """Return the seconds that the call's run has used of a replica that it shares; None for one of its own."""
        return None

    def metered(self, reply: Reply[T], call: Call) -> Reply[T]:
        """Return the reply with what the call's run has used."""
        return replace(reply, metered_s=self.metered_s(call))

    async def sleep(self, call: Call, tier: SleepTier) -> Reply[Slept]:
        """Release the memory of the replica's devices but keep its processes; idempotent.

        Work is refused until `wake`. Does nothing for a function that holds nothing on a device.
        """
        self.admit(call)
        return self.reply(Slept(tier, 0, 0), time.time())

    async def wake(self, call: Call) -> Reply[None]:
        """Restore the memory and the retained state; idempotent."""
        self.admit(call)
        return self.reply(None, time.time())

    async def stop(self, call: Call) -> Reply[SharedNow | None]:
        """End the replica's own processes; the fleet then deletes the replica itself. Returns as `renew`."""
        self.admit(call)
        return self.reply(None, time.time())

    def info(self, pids: tuple[int, ...] = (), step: int = 0, metered_s: float | None = None) -> ReplicaInfo:
        of_process = self.incarnation, os.getpid(), os.uname().nodename, pids
        return ReplicaInfo(*of_process, self._settings_key, step, metered_s=metered_s)

    def clean_up(self) -> None:
        """Remove the replica's files outside its processes. Called when its driver is permanently gone."""

    def _abandoned(self) -> None:
        """Release the devices when the lease expires, by deleting the application.

        Serve would restart a process that merely exits.
        """
        with contextlib.suppress(Exception):  # no error may keep the replica from releasing its device
            self.clean_up()
        from ray import serve  # takes seconds to import, and a driver that only makes calls does not need it

        try:
            serve.delete(serve.get_replica_context().app_name, _blocking=False)
        except Exception:  # Serve itself is gone
            os._exit(1)


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """The devices of a replica, and how to bind to them."""

    kind: Literal["cpu", "cuda"]
    ids: tuple[str, ...]
    """Core numbers, or entries of CUDA_VISIBLE_DEVICES, as its node names them."""
    exclusive: bool
    """Pin to these cores. Functions that share all cores with others are left to the scheduler."""
    node: str = ""
    """Ray's ID of the node: device numbers repeat across nodes."""
    shared: bool = False
    """Other functions or ranks use the same devices."""

    def require_usable(self) -> None:
        """Raise GpuNotShared if the devices are shared but one of them accepts only one process."""
        if self.shared and self.kind == "cuda":
            require_shareable(self.ids)

    def bind(self) -> None:
        """Restrict this process and its children to its devices.

        Call this before torch or vLLM is imported: thread pools and CUDA read the environment once.
        """
        # On CPU cores the mask is empty: a process that asks Ray for no GPU would see all GPUs of its node.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.ids) if self.kind == "cuda" else ""
        if self.kind == "cuda":
            return
        threads = str(len(self.ids))
        os.environ["OMP_NUM_THREADS"] = threads
        # OpenMP's threads spin at their barriers by default. On shared cores a spinning thread takes time from the
        # thread it waits for: a learner's step was 6 times slower with one other process running.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["MKL_NUM_THREADS"] = threads
        if self.exclusive:
            available = os.sched_getaffinity(0)
            wanted = set(map(int, self.ids)) & available
            if wanted:
                for thread in os.listdir("/proc/self/task"):
                    with contextlib.suppress(ProcessLookupError):  # it may have exited since it was listed
                        os.sched_setaffinity(int(thread), wanted)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a replica lives without a call from its driver."""

    first_s: float
    """Seconds until the first call; must cover the start."""
    renewed_s: float
    """Seconds after each call."""


class Lease:
    """Calls `expired` once, from its own thread, when `renew` was not called in time."""

    def __init__(self, terms: LeaseTerms, expired: Callable[[], None]) -> None:
        self._terms = terms
        self._expired = expired
        self._ends_s = time.monotonic() + terms.first_s
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self, for_s: float | None = None) -> None:
        """Renew the lease for its regular term, or for `for_s`."""
        self._ends_s = time.monotonic() + (self._terms.renewed_s if for_s is None else for_s)

    def _watch(self) -> None:
        while (left_s := self._ends_s - time.monotonic()) > 0:
            # The first call shortens the wait, so check well before its end.
            time.sleep(min(left_s, self._terms.renewed_s))
        log.warning("no call for %.0f s; assuming the driver is gone and stopping this replica", self._terms.renewed_s)
        self._expired()
