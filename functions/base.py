"""The base of every function: its incarnation, the fence against old drivers, and replies that carry the work done.

A function is a Serve deployment with one replica. Serve revives a dead replica under the same name, so every reply
carries the *incarnation*, drawn at random in each process: an unknown incarnation is a new replica that has loaded
nothing. Calls carry (run, attempt, step); a replica refuses calls of an older attempt than the newest it has seen, so a
driver that was believed dead can do no harm.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from rlhfless.functions.cuda import require_shareable
from rlhfless.functions.lease import Lease, LeaseTerms
from rlhfless.functions.loopback import bind_replica_to_loopback
from rlhfless.functions.out_of_memory import Planned
from rlhfless.records import SleepTier, Slept
from rlhfless.util.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound="Function")


@dataclass(frozen=True, slots=True)
class Call:
    """The run, attempt and step of a call."""

    run_id: str
    attempt: int
    step: int


@dataclass(frozen=True, slots=True)
class CallUsage:
    """The work of a call, for the ledger."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0
    sequences: int = 0
    size_bytes: int = 0
    version: str = ""
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A result, with the times of the function's body (unix time) and its work."""

    incarnation: str
    value: T
    start_s: float
    end_s: float
    usage: CallUsage = CallUsage()


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """The description that a replica gives of itself when it is up."""

    incarnation: str
    pid: int
    host: str
    pids: tuple[int, ...] = ()
    """Ids of further processes that the replica owns, such as its engine or its ranks."""
    settings_key: str = ""
    """Digest of the settings it was started with: a driver takes a replica over only if its own settings are equal."""
    step: int = 0
    """For a learner: the last training step of its weights."""
    kv_capacity_tokens: int = 0
    """For a generation actor: tokens that its KV cache holds; 0 if the engine does not say."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """For a generation actor: the duration of each phase of its engine's start, by StartPhase."""
    log: str = ""
    """For a generation actor: the file on its host that has what its engine prints."""


class FunctionBroken(RuntimeError):
    """The replica answers but can no longer work, for example because its engine died. Start a new replica."""


class StaleCall(UserError):
    """A call of another run, or of an older attempt, was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings:
    """The settings that every function has."""

    run_id: str
    lease: LeaseTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings(FunctionSettings):
    """The settings that every function with ranks has."""

    rank_bindings: tuple[DeviceBinding, ...]
    """The devices of each rank."""
    call_timeout_s: float
    """Limit of a call of all ranks, and of each collective operation."""
    planned: Planned = field(default_factory=dict)
    """What the memory plan counts for one rank."""


@dataclass(frozen=True, slots=True)
class CallResult(Generic[T]):
    """The value of a call, and its work."""

    value: T
    usage: CallUsage = CallUsage()


def admitted(
    body: Callable[Concatenate[F, Call, P], Awaitable[CallResult[T]]],
) -> Callable[Concatenate[F, Call, P], Coroutine[Any, Any, Reply[T]]]:
    """Make a method that drivers call: admit the call, run the body, and reply with its times and work."""

    @functools.wraps(body)
    async def method(self: F, call: Call, *arguments: P.args, **keywords: P.kwargs) -> Reply[T]:
        self.admit(call)
        start_s = time.time()
        worked = await body(self, call, *arguments, **keywords)
        return self.reply(worked.value, start_s, worked.usage)

    return method


def settings_key(settings: FunctionSettings) -> str:
    """Equal for equal settings, in any process."""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()


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
        """Wraps the loads of a constructor. If a constructor raises, Serve keeps the text of the error and loses its
        type. So an error that the user can correct is kept here and raised by every call; the first call is `describe`.
        """
        try:
            yield
        except UserError as error:
            self._unfit = error

    def admit(self, call: Call) -> None:
        """Let a call in, or raise StaleCall, or what the start raised."""
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
        """The description of this replica. Raises FunctionBroken if it can no longer work."""
        self.admit(call)
        return self.reply(self.info(), time.time())

    async def renew(self, call: Call) -> Reply[None]:
        """Exchange signs of life with the driver."""
        self.admit(call)
        return self.reply(None, time.time())

    def reply(self, value: T, start_s: float, usage: CallUsage | None = None) -> Reply[T]:
        """Wrap a result of a body that ends now."""
        return Reply(self.incarnation, value, start_s, time.time(), usage or CallUsage())

    async def sleep(self, call: Call, tier: SleepTier) -> Reply[Slept]:
        """Give up the memory of the replica's devices and keep its processes; idempotent. Its work is refused until
        `wake`. A function that holds nothing on a device does nothing."""
        self.admit(call)
        return self.reply(Slept(tier, 0, 0), time.time())

    async def wake(self, call: Call) -> Reply[None]:
        """Get the memory back, and the state that was kept; idempotent."""
        self.admit(call)
        return self.reply(None, time.time())

    async def stop(self, call: Call) -> Reply[None]:
        """End the replica's own processes; the fleet deletes the replica itself after this."""
        self.admit(call)
        return self.reply(None, time.time())

    def info(self, pids: tuple[int, ...] = (), step: int = 0) -> ReplicaInfo:
        return ReplicaInfo(self.incarnation, os.getpid(), os.uname().nodename, pids, self._settings_key, step)

    def clean_up(self) -> None:
        """Remove the replica's files outside its processes. Called when its driver is gone for good."""

    def _abandoned(self) -> None:
        """Give the devices back when the lease has run out. Serve would restart a process that only ends, so the
        application itself is deleted."""
        with contextlib.suppress(Exception):  # no error may keep the replica from giving its device back
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
    """Numbers of its cores, or its entries of CUDA_VISIBLE_DEVICES, as they are called on its node."""
    exclusive: bool
    """Pin to these cores. A function that shares all cores with others is left to the scheduler."""
    node: str = ""
    """Ray's id of the node: numbers are alike on many nodes."""
    shared: bool = False
    """Other functions, or ranks, use the same devices."""

    def require_usable(self) -> None:
        """Raises GpuNotShared if the devices are shared, and one of them takes one process alone."""
        if self.shared and self.kind == "cuda":
            require_shareable(self.ids)

    def bind(self) -> None:
        """Restrict this process, and what it starts, to its devices.

        Call it before torch or vLLM is imported: thread pools and CUDA look at the environment once.
        """
        # On CPU cores the mask is empty: a process that asks Ray for no GPU would see all GPUs of its node.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.ids) if self.kind == "cuda" else ""
        if self.kind == "cuda":
            return
        threads = str(len(self.ids))
        os.environ["OMP_NUM_THREADS"] = threads
        # OpenMP's threads spin at their barriers by default. On shared cores a spinning thread takes the time of the
        # thread that it waits for: a learner's step was 6 times slower with one other process running.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["MKL_NUM_THREADS"] = threads
        if self.exclusive:
            available = os.sched_getaffinity(0)
            wanted = set(map(int, self.ids)) & available
            if wanted:
                for thread in os.listdir("/proc/self/task"):
                    with contextlib.suppress(ProcessLookupError):  # it may have ended since it was listed
                        os.sched_setaffinity(int(thread), wanted)
