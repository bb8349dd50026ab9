"""A function that runs on ranks: its controller, the calls to all ranks, and a rank's Ray actor.

The Serve replica is the controller and imports no torch. Ranks are plain Ray actors that form a torch.distributed group
and shard the model's parameters; a single rank takes the same path as several. Each call goes to all ranks, and each
rank computes its share of the sequences.

Ranks wait for each other inside collective operations. When a rank raises, dies or hangs, the others notice late, with
a network error, or never. So the first failure ends the wait. After a short grace period for the original failure to
arrive, all ranks are killed and the error names that failure. An error that all ranks raise alike, such as a refused
argument, leaves them in step, and they continue. After a lost rank the fleet starts a new replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import CallResult, DistributedSettings, Function, RankPlace, admitted
from rlhfless.functions.calls import Call, CallUsage, FunctionBroken, ReplicaInfo, SharedNow
from rlhfless.functions.devices import ALLOCATOR, EXPANDABLE, PINNED, naming_memory_errors, require_cuda
from rlhfless.functions.loopback import (
    LOOPBACK,
    bind_rendezvous_to_loopback,
    free_port,
    interface_environment,
    loopback_environment,
    set_default_environment,
)
from rlhfless.records import FloatArray, SleepTier, Slept
from rlhfless.scaling.latency.devices import NODE_LABEL
from rlhfless.util.errors import UserError, class_and_line, first_line

if TYPE_CHECKING:
    import torch

    from rlhfless.functions.host_offload import HostOffload

GRACE_S = 10.0
"""Wait after the first failure for those of other ranks. Ray reports a killed process after 1 to 5 seconds; gloo ranks
see its closed connections earlier."""

_OF_NETWORK = ("gloo", "nccl", "connection", "socket", "broken pipe", "timed out", "timeout")
"""Words in the errors of a rank that waits for another (torch's backends share no error type)."""


class RankGroup:
    """Rank actors in order. `function` is its name in errors."""

    def __init__(self, ranks: Sequence[Any], limit_s: float, function: str) -> None:
        self.ranks = tuple(ranks)
        self._limit_s = limit_s
        self._function = function
        self._broken: BaseException | None = None

    async def call_all(self, method: str, *arguments: object, limit_s: float | None = None) -> list[Any]:
        """Call a method of every rank actor; return the answers in order.

        Raises the error of `_judge`, also after `limit_s` (default: the group's limit).
        """
        calls = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
        return await self._answers(method, calls, limit_s or self._limit_s)

    async def call(self, method: str, *arguments: object, **keywords: object) -> list[Any]:
        """Call a method of every rank's model (RankActor.call). Otherwise like `call_all`."""
        calls = [rank.call.remote(method, *arguments, **keywords) for rank in self.ranks]
        return await self._answers(method, calls, self._limit_s)

    async def call_rank0(self, method: str, *arguments: object) -> Any:
        """Call a method of rank 0 only."""
        return (await self._answers(method, [getattr(self.ranks[0], method).remote(*arguments)], self._limit_s))[0]

    def end(self) -> None:
        """Kill the ranks."""
        for rank in self.ranks:
            ray.kill(rank)

    async def _answers(self, method: str, calls: Sequence[Awaitable[Any]], limit_s: float) -> list[Any]:
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, waiting = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and any(task.exception() for task in done):
                await asyncio.wait(waiting, timeout=GRACE_S)
            failures = {number: task.exception() for number, task in enumerate(tasks) if task.done()}
            causes = {number: error for number, error in failures.items() if error is not None}
            late = [number for number, task in enumerate(tasks) if not task.done()]
        finally:
            for task in tasks:
                task.cancel()
        if not causes and not late:
            return [task.result() for task in tasks]
        # Concurrent calls fail because the ranks were killed; all raise the first reason.
        raise self._broken or self._judge(method, causes, late, len(tasks), limit_s)

    def _judge(
        self, method: str, failures: Mapping[int, BaseException], late: list[int], asked: int, limit_s: float
    ) -> BaseException:
        """Return the ranks' error if all raised the same kind, which leaves them in step; otherwise kill the ranks."""
        # The errors that methods raised, or else those of the calls.
        causes = {n: error.cause if isinstance(error, RayTaskError) else error for n, error in failures.items()}
        if len(failures) == asked and all(map(_raised, failures.values())):
            kinds = {type(cause) for cause in causes.values()}
            if len(kinds) == 1 and (asked == 1 or not any(map(_of_network, causes.values()))):
                return causes[0]
        self._broken = self._blamed(method, failures, causes, late, limit_s)
        self.end()
        return self._broken

    def _blamed(
        self,
        method: str,
        failures: Mapping[int, BaseException],
        causes: Mapping[int, BaseException],
        late: list[int],
        limit_s: float,
    ) -> BaseException:
        """Return an error that the user can correct, or else FunctionBroken naming the first rank that failed."""
        if not causes:
            ranks = ", ".join(map(str, late))
            return FunctionBroken(
                f"a {self._function} rank did not finish `{method}` within {limit_s:.0f} s (still at work: {ranks})"
            )
        number = min(causes, key=lambda number: (_order(failures[number], causes[number]), number))
        cause = causes[number]
        if isinstance(cause, UserError):
            return cause
        what = f"was lost during `{method}`" if not _raised(failures[number]) else f"failed in `{method}`"
        reason = class_and_line(cause) if _raised(failures[number]) else first_line(cause)
        broken = FunctionBroken(f"{self._function} rank {number} {what}: {reason}")
        broken.__cause__ = cause
        return broken


def _raised(error: BaseException) -> bool:
    return isinstance(error, RayTaskError) or not isinstance(error, RayError)


def _order(error: BaseException, cause: BaseException) -> int:
    """Rank errors by blame: lost ranks, then own errors, then errors of waiting for another rank."""
    return 0 if not _raised(error) else 2 if _of_network(cause) else 1


def _of_network(cause: BaseException) -> bool:
    if isinstance(cause, UserError):
        return False
    names = {kind.__name__ for kind in type(cause).__mro__}
    message = str(cause).lower()
    return "DistError" in names or (isinstance(cause, RuntimeError) and any(word in message for word in _OF_NETWORK))


class Asleep(RuntimeError):
    """Raised while the rank sleeps: its tensors are in host memory."""


S = TypeVar("S", bound=DistributedSettings)


class RankActor(Generic[S]):
    """Rank `rank` of a function."""

    named = ""
    """Name of the function in errors."""
    phases: ClassVar[Mapping[str, str]] = {}
    """Methods of `_rank` that `call` may call, with their phase in the memory plan."""
    _rank: Any
    """This rank's model, set by `_load`: it has the methods of `phases`, and `kept_on_device`."""
    _offload: HostOffload | None = None
    """Created by the first sleep."""

    def __init__(self, settings: S, rank: int) -> None:
        settings.rank_bindings[rank].bind()
        self._settings = settings
        self._number = rank

    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="signs_of_life")
    def alive(self) -> None:
        """Answer, even while the rank computes."""

    def node(self) -> str:
        """Return the address of this rank's node, as Ray knows it."""
        return ray.util.get_node_ip_address()

    @property
    def shares_device_memory(self) -> bool:
        """Return whether other processes read this rank's GPU memory."""
        return False

    @property
    def reaches_other_nodes(self) -> bool:
        """Return whether the rank joins process groups across nodes, in addition to its ranks' group."""
        return False

    def rendezvous(self, on_one_node: bool) -> str:
        """Return an address on this node for the ranks' rendezvous; loopback if all ranks are on this node."""
        host = LOOPBACK if on_one_node else self.node()
        return f"tcp://{host}:{free_port(host)}"

    def start(self, address: str, on_one_node: bool) -> None:
        """Join the other ranks and load the model. Raises NoCuda if the node's GPUs are unreachable. *Collective.*"""
        binding = self._settings.rank_bindings[self._number]
        binding.require_usable()
        if binding.kind == "cuda":
            settings = (PINNED,) if self.shares_device_memory else (PINNED, EXPANDABLE)
            set_default_environment({ALLOCATOR: ",".join(settings)})
            require_cuda()
        if on_one_node and not self.reaches_other_nodes:
            set_default_environment(loopback_environment())
        else:
            set_default_environment(interface_environment(self.node()))
        bind_rendezvous_to_loopback()
        self._load(address)

    def _load(self, address: str) -> None:
        raise NotImplementedError

    def call(self, method: str, *arguments: object, **keywords: object) -> Any:
        """Call a method of the rank's model in its memory phase. *Collective.*"""
        with self._at_work(self.phases[method]):
            return getattr(self._rank, method)(*arguments, **keywords)

    def compute(self, batch: PackedBatch) -> tuple[FloatArray | None, int]:
        """Return a per-token output of the batch (None on all ranks but 0), and this rank's shared prompt tokens.

        *Collective.*
        """
        values, shared_tokens = self.call("compute", batch)
        return None if self._number else values, shared_tokens

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        """Return all tensors on the device between two calls; they are offloaded while the rank sleeps."""
        kept: Iterable[torch.Tensor] = self._rank.kept_on_device()
        return kept

    def sleep(self) -> Slept:
        """Offload the rank's tensors to host memory. Idempotent."""
        from rlhfless.functions.host_offload import HostOffload, held_bytes
        from rlhfless.functions.sharding import default_device

        device = default_device()
        before = held_bytes(device)
        if self._offload is None:  # the tensors stay the same for the life of the rank
            self._offload = HostOffload(self.kept_on_device())
        self._offload.offload()
        held = held_bytes(device)
        return Slept(SleepTier.HOST, max(before - held, 0), held)

    def wake(self) -> None:
        """Move the tensors back to the device. Idempotent."""
        if self._offload is not None:
            with self._naming_memory_errors("wake"):
                self._offload.restore()

    def _place(self, address: str) -> RankPlace:
        """Return this rank's place among the ranks that meet at `address`."""
        settings = self._settings
        return RankPlace(self._number, len(settings.rank_bindings), address, settings.call_timeout_s)

    @property
    def _threads(self) -> int:
        """Threads of a rank with its own cores."""
        return len(self._settings.rank_bindings[self._number].ids)

    @contextlib.contextmanager
    def _at_work(self, phase: str) -> Iterator[None]:
        """Name the phase in out-of-memory errors. Raises Asleep while the rank sleeps."""
        if self._offload is not None and self._offload.offloaded:
            raise Asleep(f"{self.named} rank {self._number} sleeps, and cannot {phase}; wake it first")
        with self._naming_memory_errors(phase):
            yield

    def _naming_memory_errors(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return naming_memory_errors(f"{self.named} rank {self._number}", phase, self._settings.planned)


SILENT_SHARE = 0.5
"""Share of a lease within which every rank must answer. Drivers ask four times per lease, and give up on a replica that
is silent for a whole lease."""


class DistributedFunction(Function):
    """Starts a rank actor for each of `settings.rank_bindings`. Serve awaits the constructor."""

    named: str
    """Name of the function in errors."""
    actor: ClassVar[type]
    """Class of the rank actors, a RankActor."""

    async def __init__(self, settings: DistributedSettings) -> None:  # type: ignore[misc]
        super().__init__(settings)
        self._lease_s = settings.lease.renewed_s
        self._looking: asyncio.Task[list[Any]] | None = None
        ranks = [self._rank_actor(settings, rank) for rank in range(len(settings.rank_bindings))]
        self._group = RankGroup(ranks, settings.call_timeout_s, self.named)
        with self.starting():
            # Rank 0 opens the rendezvous on its own node; the others need its address.
            on_one_node = len(set(await self._group.call_all("node"))) == 1
            address = await self._group.call_rank0("rendezvous", on_one_node)
            await self._group.call_all("start", address, on_one_node)

    def _rank_actor(self, settings: DistributedSettings, rank: int) -> Any:
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "label_selector": {NODE_LABEL: settings.rank_bindings[rank].node},
            "max_restarts": 0,
            # Threads for calls that must be answered while the rank computes.
            "concurrency_groups": {"signs_of_life": 1, "waits": 1},
        }
        make: Any = ray.remote(**options)  # type: ignore[call-overload]  # Ray's types do not know every option
        return make(self.actor_of(settings)).remote(settings, rank)

    def actor_of(self, settings: Any) -> type:  # noqa: ARG002 - an override may need it
        """Return the class of the rank actors."""
        return self.actor

    @admitted
    async def describe(self, _: Call) -> CallResult[ReplicaInfo]:
        """Return this replica's info with the ranks' PIDs. Raises FunctionBroken if a rank is lost."""
        pids = await self._group.call_all("pid")
        return CallResult(self.info(tuple(pids), self._step_of_weights))

    @admitted
    async def compute(self, _: Call, batch: PackedBatch) -> CallResult[FloatArray]:
        """Return a per-token output `[tokens]` of complete groups; 0 on tokens that were not generated.

        Rank 0 returns the values of all ranks; each rank counts its own shared prompt tokens.
        """
        answers: list[tuple[FloatArray | None, int]] = await self._group.call_all("compute", ray.put(batch))
        (values,) = (values for values, _ in answers if values is not None)
        shared_tokens = sum(shared for _, shared in answers)
        usage = CallUsage(input_tokens=len(batch.tokens), cached_tokens=shared_tokens, sequences=batch.sequences)
        return CallResult(values, usage)

    @property
    def _step_of_weights(self) -> int:
        """The last training step of the weights."""
        return 0

    @admitted
    async def renew(self, _: Call) -> CallResult[SharedNow | None]:
        """Renew the lease (see Function.renew) once all ranks answer.

        Raises FunctionBroken after SILENT_SHARE of a lease.
        """
        if self._looking is None or self._looking.done():
            # Shorter than the driver's limit, so that the error names the rank.
            limit_s = self._lease_s * SILENT_SHARE
            self._looking = asyncio.create_task(self._group.call_all("alive", limit_s=limit_s))
        await asyncio.shield(self._looking)
        return CallResult(None)

    @admitted
    async def sleep(self, call: Call, tier: SleepTier) -> CallResult[Slept]:  # noqa: ARG002
        """Offload all ranks. The tier is always HOST: the ranks' state is nowhere else."""
        slept: list[Slept] = await self._group.call_all("sleep")
        freed, held = sum(each.freed_bytes for each in slept), sum(each.held_bytes for each in slept)
        return CallResult(Slept(SleepTier.HOST, freed, held))

    @admitted
    async def wake(self, _: Call) -> CallResult[None]:
        """Wake all ranks (see Function.wake)."""
        await self._group.call_all("wake")
        return CallResult(None)

    @admitted
    async def stop(self, _: Call) -> CallResult[SharedNow | None]:
        """Kill the ranks. The controller is unusable afterwards."""
        self._group.end()
        return CallResult(None)
