"""A cluster and its actors without Ray and vLLM. Tests control when replicas start, load and stop, and when tokens
arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fakes.builders import drawn
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.fleet.replicas import Blueprint
from rlhfless.functions.calls import Call, CallUsage, ReplicaInfo, Reply
from rlhfless.functions.generation.messages import (
    Ended,
    GenerateRequest,
    GroupsFinished,
    Loaded,
    PrecomputeRequest,
    Progress,
    SampleItem,
    SampleKey,
)
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.scaler import EvenSplit, PolicyRunner
from rlhfless.records import (
    Decision,
    FinishReason,
    FunctionName,
    FunctionRole,
    Group,
    Prompt,
    ReplicaState,
    Rollout,
    SleepTier,
    Slept,
    WeightVersion,
)
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.function_specs import Bounds, declared
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import EngineLimits, FleetView, Policy, ReplicaSlot, SlotView
from rlhfless.spec import TimeoutsSpec

CALL = Call("run", 1, 3)
OWN = WeightVersion("run", 1, 0, "own")


class FakeCluster:
    """Records the requests it receives. With `gated`, starts wait for the test."""

    lost = False

    def __init__(self, *, gated: bool = True) -> None:
        self.gated = gated
        self.begun: list[int] = []
        """Slots whose starts have begun, in order."""
        self.gates: dict[int, asyncio.Future[None]] = {}
        """Gates of the starts, by slot."""
        self.loads: dict[str, asyncio.Future[None]] = {}
        """Gates of loads that wait for the test, by replica name."""
        self.held: dict[tuple[str, str], asyncio.Future[None]] = {}
        """Gates of other calls, by replica name and method."""
        self.restless: set[str] = set()
        """Names of replicas that fail to sleep."""
        self.tiers: list[SleepTier] = []
        """The tier of each call of `sleep`."""
        self.stopped: list[str] = []
        self._slots: dict[str, int] = {}

    async def deploy(self, name: str, function: Any, settings: Sequence[int], node: str, stop_s: float) -> Any:
        slot = settings[0]
        self._slots[name] = slot
        self.begun.append(slot)
        self.gates[slot] = asyncio.get_running_loop().create_future()
        if not self.gated:
            self.gates[slot].set_result(None)
        return FakeHandle(name, self)

    async def wait_running(self, name: str, timeout_s: float) -> None:
        await self.gates[self._slots[name]]

    async def delete(self, names: Sequence[str]) -> None:
        self.stopped += names


class FakeDevices:
    """Grants every device at once, and records its users."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.to_come: set[str] = set()
        """Names of devices whose node has yet to join."""

    async def acquire(self, allocation: Allocation, user: str, lost: Any) -> Allocation:
        self.users.add(user)
        return allocation

    def reserved(self, allocations: Sequence[Allocation], user: str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def finish_start(self, user: str) -> None: ...

    def must_come(self, allocation: Allocation) -> bool:
        return allocation.devices[0].name in self.to_come

    def bound(self, allocation: Allocation) -> Allocation:
        return allocation

    async def release(self, *users: str) -> None:
        self.users -= set(users)


class FakeHandle:
    """Answers every call at once, except loads that wait."""

    def __init__(self, name: str, cluster: FakeCluster) -> None:
        self._name = name
        self._cluster = cluster

    def call(self, method: str, *args: object, **__: object) -> Any:
        self._cluster.tiers += [each for each in args if isinstance(each, SleepTier)]
        return self._answer(method)

    async def _answer(self, method: str) -> Reply[Any]:
        if method == "load" and self._name in self._cluster.loads:
            await self._cluster.loads[self._name]
        if (held := self._cluster.held.get((self._name, method))) is not None:
            await held
        if method == "sleep" and self._name in self._cluster.restless:
            raise CallTimeout("waited 1 s for its memory")
        info = ReplicaInfo(f"{self._name}-1", 1, "here")
        slept = Slept(SleepTier.HOST, 1, 0)
        value = {"sleep": slept, "load": Loaded("", None, 1), "renew": None, "stop": None}.get(method, info)
        return Reply(info.incarnation, value, 0.0, 0.0, CallUsage())


class NoRecords:
    """Discards holdings, invocations and decisions."""

    def add_holding(self, holding: Any) -> None: ...

    def add_invocation(self, invocation: Any) -> None: ...

    def add_decision(self, decision: Any) -> None: ...


def pool_of(
    cluster: FakeCluster,
    *names: str,
    slots: int = 3,
    bounds: Bounds | None = None,
    function: FunctionName = FunctionName.GENERATION,
    given: Sequence[Allocation] = (),
) -> ReplicaPool:
    """Return a real pool with serving replicas of these names in the first slots. `given`: the pool's allocations."""
    all_allocations = tuple(given) or tuple(Allocation.of([Device(f"cpu-{i}", "cpu-core", i)]) for i in range(slots))
    blueprint = Blueprint(
        declared()[function], object, all_allocations.index, all_allocations, bounds or Bounds(1, "min_actors")
    )
    pool = ReplicaPool(cluster, FakeDevices(), blueprint, CALL, TimeoutsSpec(), NoRecords())  # type: ignore[arg-type]
    for slot, name in enumerate(names[: len(all_allocations)]):
        replica = pool._new(name, slot)
        replica.mark_adopted(FakeHandle(name, cluster), ReplicaInfo(f"{name}-1", 1, "here"), None)  # type: ignore[arg-type]
        replica.ask(OWN)
        replica.mark_loaded(OWN)
        assert replica.state is ReplicaState.SERVING
    return pool


def prompt(name: str) -> Prompt:
    return Prompt(name, (1, 2, 3), f"prompt {name}")


def rollout(item: SampleItem, actor: str, tokens: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
    """Return a rollout of `tokens` tokens in total, keeping the tokens that the item brought along."""
    prior = [] if item.prior is None else list(item.prior.token_ids)
    token_ids = np.array(prior + [7] * (tokens - len(prior)), dtype=np.int64)
    given = (item.prompt_id, item.sample_index, token_ids)
    return drawn(*given, text="text", seed=item.seed, reason=reason, actor=actor)


def group(name: str, samples: int = 1) -> Group:
    items = [SampleItem(name, i, (1, 2, 3), seed=i) for i in range(samples)]
    return Group.of(prompt(name), tuple(rollout(item, "a", 2) for item in items))


@dataclass
class FakeActor:
    """An actor that keeps its samples running until the test finishes them."""

    name: str
    allocation: Allocation
    state: ReplicaState = ReplicaState.SERVING
    info: Any = None
    requests: list[GenerateRequest] = field(default_factory=list)
    running: dict[SampleKey, SampleItem] = field(default_factory=dict)
    queues: list[asyncio.Queue[Any]] = field(default_factory=list)
    queue_of: dict[SampleKey, asyncio.Queue[Any]] = field(default_factory=dict)
    precomputed: list[tuple[PrecomputeRequest, int]] = field(default_factory=list)
    """Each with the number of generate requests before it."""
    slow: bool = False
    """Makes precomputations time out."""
    serves: str = "run/1/2/d"

    @property
    def served(self) -> str | None:
        return self.serves if self.state is ReplicaState.SERVING else None

    open_device_s: ClassVar[dict[str, float]] = {}

    def cut(self) -> None: ...

    async def stream(self, work: Any, method: str, call: Any, request: Any, timeout_s: float) -> AsyncIterator[Any]:
        assert method == "generate"
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.requests.append(request)
        self.queues.append(queue)
        self.running |= {item.key: item for item in request.items}
        self.queue_of |= {item.key: queue for item in request.items}
        left = len(request.items)
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= sum(map(len, getattr(event, "groups", ())))
            yield event

    async def call(self, method: str, call: Any, keys: Any, **_: Any) -> Any:
        if method == "precompute":
            self.precomputed.append((keys, len(self.requests)))
            if self.slow:
                raise CallTimeout("waited 1 s for shared prefixes")
            return tuple({"from": self.name} if keys.offer else None for _ in keys.prefixes)
        assert method == "abort"
        running = [key for key in keys if key in self.running]  # the others have just ended, or have not arrived yet
        for prompt_id in dict.fromkeys(key[0] for key in running):
            self._deliver([key for key in running if key[0] == prompt_id], 5, FinishReason.ABORT)
        return len(running)

    def ask(self, version: WeightVersion) -> None:
        """Request other weights."""
        if self.state is ReplicaState.SERVING:
            self.state = ReplicaState.STALE

    def drain(self) -> None:
        self.state = ReplicaState.DRAINING

    def finish(self, *prompt_ids: str, tokens: int = 9) -> None:
        """End all samples of these prompts, or of all prompts."""
        for prompt_id in prompt_ids or sorted({key[0] for key in self.running}):
            self._deliver([key for key in self.running if key[0] == prompt_id], tokens, FinishReason.STOP)

    def _deliver(self, keys: Sequence[SampleKey], tokens: int, reason: FinishReason) -> None:
        for queue in dict.fromkeys(self.queue_of[key] for key in keys):  # each request has its own stream
            mine = [key for key in keys if self.queue_of[key] is queue]
            done = tuple(rollout(self.running.pop(key), self.name, tokens, reason) for key in mine)
            queue.put_nowait(GroupsFinished("x", (done,)))

    def heartbeat(self, tokens: dict[SampleKey, int], ended: dict[SampleKey, Ended] | None = None) -> None:
        """Send a heartbeat to every request."""
        for queue in self.queues:
            mine = {key: count for key, count in tokens.items() if self.queue_of[key] is queue}
            over = {key: end for key, end in (ended or {}).items() if self.queue_of[key] is queue}
            queue.put_nowait(Progress("x", mine, over))

    def fail(self, error: Exception) -> None:
        for queue in self.queues:
            queue.put_nowait(error)

    def die(self) -> None:
        self.state = ReplicaState.DEAD
        self.fail(ReplicaLost(f"{self.name} died"))


class FakePool:
    """The part of a pool that a generation stage and a live fleet use. Actors occupy slots in the order of their names,
    none starts by itself, and a released actor is gone at once."""

    function = FunctionName.GENERATION
    kind = declared()[FunctionName.GENERATION]
    turn = staticmethod(lambda _: contextlib.nullcontext())

    def __init__(self, *names: str, allocations: int = 3, fewest: int = 1) -> None:
        self.bounds = Bounds(fewest, "min_actors")
        self.allocations = tuple(Allocation.of([Device(f"cpu-{i}", "cpu-core", i)]) for i in range(allocations))
        self.actors: dict[str, FakeActor] = {}
        for name in names:
            self.join(name)

    def settled(self) -> tuple[FakeActor, ...]:
        return tuple(self.actors.values())

    def __getitem__(self, name: str) -> FakeActor:
        return self.actors[name]

    def at(self, number: int) -> FakeActor | None:
        allocation = self.allocations[number]
        return next((a for a in self.actors.values() if a.allocation is allocation and a.state.holds_device), None)

    def slot_of(self, name: str) -> int:
        return next(
            number
            for number in range(len(self.allocations))
            if self.allocations[number] is self.actors[name].allocation
        )

    def replicas(self) -> tuple[FakeActor, ...]:
        return tuple(self.actors.values())

    up = replicas

    def serving(self) -> tuple[FakeActor, ...]:
        return tuple(actor for actor in self.actors.values() if actor.state is ReplicaState.SERVING)

    def watch(self, listener: Any) -> None: ...

    def must_come(self, slot: int) -> bool:
        return False

    def state(self, slot: int) -> ReplicaState | None:
        actor = self.at(slot)
        return None if actor is None else actor.state

    def expects(self, slot: int) -> bool:
        return self.at(slot) is not None

    def start(self, slot: int, call: Any, at_s: float | None) -> None: ...

    def release(self, slot: int) -> bool:
        actor = self.at(slot)
        if actor is None or sum(map(self.expects, range(len(self.allocations)))) <= self.bounds.fewest:
            return False
        actor.state = ReplicaState.RETIRED
        return True

    def join(self, name: str, allocation: int | None = None) -> FakeActor:
        if allocation is None:
            allocation = next(number for number in range(len(self.allocations)) if self.at(number) is None)
        self.actors[name] = FakeActor(name, self.allocations[allocation])
        return self.actors[name]


ENGINE = EngineLimits(LinearEngine(0.01, 0.0001, 0.0, 0.0, 0.0), kv_capacity_tokens=10_000, max_sequences=64)


class FakeFleet:
    """A policy's view of a FakePool. Records the policy's starts and releases."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.starting: set[int] = set()
        self.started: list[tuple[int, float | None, int]] = []
        self.released: list[tuple[int, str | None]] = []

    def view(self) -> FleetView:
        replica_slots = tuple(
            ReplicaSlot(
                FunctionName.GENERATION,
                FunctionRole.SAMPLES,
                "cpu-core",
                (allocation.devices[0].name,),
                "n",
                1e-5,
                20.0,
                {},
                {},
                ENGINE,
            )
            for allocation in self.pool.allocations
        )
        return FleetView(replica_slots, 0.05, 0.05, float("inf"), 0.5, 100)

    def slots(self, table: InFlightSamples) -> tuple[SlotView, ...]:
        states = map(self._state, range(len(self.pool.allocations)))
        return tuple(map(SlotView, states, *(counts.tolist() for counts in table.counts())))

    def expects(self, slot: int) -> bool:
        return self._state(slot) in (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING)

    def start(self, slot: int, at_s: float | None, step: int) -> None:
        if self._state(slot) is not None:
            raise PolicyFault(f"slot {slot} has an actor")
        self.started.append((slot, at_s, step))
        self.starting.add(slot)

    def release(self, slot: int, step: int) -> None:
        self.released.append(slot)

    def _state(self, slot: int) -> ReplicaState | None:
        actor = self.pool.at(slot)
        if actor is None:
            return ReplicaState.STARTING if slot in self.starting else None
        return actor.state


def runner(pool: FakePool, policy: Policy | None = None) -> PolicyRunner:
    """Return a runner with this policy, or with an even split."""
    notes: list[Decision] = []
    return PolicyRunner(policy or EvenSplit(), FakeFleet(pool), notes.append)


class Watcher:
    """Work that records the events of all replicas and has nothing to hand back."""

    over = False

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def joined(self, slot: int) -> None:
        self.heard.append(("joined", slot))

    def missed(self, slot: int) -> None:
        self.heard.append(("missed", slot))

    async def drain(self, replica: Replica) -> None:
        self.heard.append(("drain", replica.name))
