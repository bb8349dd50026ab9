"""A cluster whose replicas answer calls after modelled seconds, and may die or be slow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import numpy as np

from rlhfless.fleet.handles import HandleLost
from rlhfless.fleet.protocols import FleetError
from rlhfless.functions.calls import Call, CallUsage, ReplicaInfo, Reply
from rlhfless.functions.generation.messages import Loaded, PrecomputeRequest, Progress, StreamEnd
from rlhfless.records import Probe, PublishedWeights, SleepTier, Slept, WeightVersion, Work
from rlhfless.scaling.fleet_constants import MOVE_S
from rlhfless.sim.devices import SimulatedDevices
from rlhfless.sim.engines import StepEngines
from rlhfless.sim.faults import NO_FAULTS, DrawnFaults, SimulatedFaults
from rlhfless.sim.setup import LearnerShape, ServiceShape, Setup
from rlhfless.sim.storage import StoredCheckpoints
from rlhfless.sim.trained import TrainedModel, TrainedState
from rlhfless.sim.virtual_loop import VirtualLoop
from rlhfless.util.clock import unix_s

NOTHING_USED = CallUsage()

PUBLISH_WAITS_S = 600.0
"""For the call to learn the step that is published, as live."""


Value = TypeVar("Value")


def version_of(call: Call, state: TrainedState) -> PublishedWeights:
    """Return the weights of a state, as published by a call."""
    version = WeightVersion(call.run_id, call.attempt, call.step, f"{state.digest:08x}")
    return PublishedWeights(version, "simulated", 1, 1, Probe((1,), (-1.0,)))


class SimulatedCluster:
    """Starts and stops replicas. The settings of a replica are its slot in the setup."""

    lost = False
    private = True

    def __init__(
        self,
        setup: Setup,
        engines: StepEngines,
        devices: SimulatedDevices,
        checkpoints: StoredCheckpoints,
        faults: SimulatedFaults = NO_FAULTS,
    ) -> None:
        self.setup = setup
        self.engines = engines
        self.devices = devices
        self.checkpoints = checkpoints
        self.drawn = DrawnFaults(faults, setup.seed)
        self.broken: list[str] = []
        """What must not happen, and has."""
        self.published: set[str] = set()
        """Labels of the published versions."""
        self._strikes = {strike.turn: strike for strike in faults.strikes}
        self._turns = 0
        if self._strikes:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.each_turn = self._turn
        seeds = np.random.SeedSequence(setup.seed).spawn(len(setup.actors))
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self.handles: dict[str, SimulatedHandle] = {}
        self.slots: dict[str, int] = {}
        """The slot of each replica that was ever started."""
        self._under_way = frozenset(setup.under_way)
        self.lives = [0] * len(setup.slot_setups)
        self._in_turns = [
            frozenset() if at.beside else frozenset(device.name for device in at.allocation.devices)
            for at in setup.slot_setups
        ]
        """By slot: the devices on which its replica takes turns."""
        self._pulled_s: dict[str, float] = {}
        """By node: when it has pulled the version."""
        self._pulled_version = ""
        self._given_s = 0.0
        """When the home node has sent all pulls so far."""

    async def deploy(self, name: str, function: Any, settings: Sequence[int], node: str, stop_s: float) -> Any:
        """Start a replica, which may be interrupted."""
        slot = settings[0]
        self.lives[slot] += 1
        self.slots[name] = slot
        handle = self.handles[name] = SimulatedHandle(self, name, slot, self.lives[slot])
        mean_s = self.setup.actors[slot].spot_mean_s if slot < len(self.setup.actors) else math.inf
        if math.isfinite(mean_s):
            life_s = float(self._random[slot].exponential(mean_s))
            asyncio.get_running_loop().call_later(life_s, self._interrupt, name)
        return handle

    def _interrupt(self, name: str) -> None:
        """Take the machine of a spot replica away."""
        handle = self.handles.get(name)
        if handle is None or handle.dead:
            return
        handle.die()
        self.devices.interrupted(name, self.setup.slot_setups[handle.slot].allocation)

    def _turn(self) -> bool:
        """Count a turn of the event loop; return whether a fault has happened."""
        self._turns += 1
        strike = self._strikes.get(self._turns)
        if strike is None or not self.handles:
            return False
        handle = [*self.handles.values()][strike.choice % len(self.handles)]
        if strike.hangs:
            handle.hang()
        else:
            handle.die()
        return True

    async def wait_running(self, name: str, timeout_s: float) -> None:
        """Wait for a replica's cold start. Raises FleetError if its machine is taken away."""
        handle = self.handles[name]
        under_way = handle.life == 1 and handle.slot in self._under_way
        await asyncio.sleep(0.0 if under_way else self.setup.slot_setups[handle.slot].start_s)
        handle.occupy()
        if handle.dead:
            raise FleetError(f"{name} did not start: its machine was taken away")

    async def delete(self, names: Sequence[str]) -> None:
        """Delete replicas, whatever they do."""
        for name in names:
            if (handle := self.handles.pop(name, None)) is not None:
                handle.die()

    def sharing(self, handle: SimulatedHandle) -> list[SimulatedHandle]:
        """Return the other replicas that are awake on devices of a replica that takes turns there."""
        mine = self._in_turns[handle.slot]
        return [
            other
            for other in self.handles.values()
            if other.awake and other is not handle and not mine.isdisjoint(self._in_turns[other.slot])
        ]

    def loaded_s(self, slot: int, version: str) -> float:
        """Return when an actor that starts now has loaded a version (see SimulatedFleet._loaded_s)."""
        transport, node, at_s = self.setup.transport, self.setup.slot_setups[slot].node, unix_s()
        if version != self._pulled_version:
            self._pulled_version = version
            self._pulled_s.clear()
        if transport.pulls(node):
            if node not in self._pulled_s:
                self._given_s = self._pulled_s[node] = max(self._given_s, at_s) + transport.pull_s
            at_s = max(at_s, self._pulled_s[node])
        return at_s + transport.load_s


class PendingAnswer(asyncio.Task[Reply[Any]]):
    """The answer to a call: a task, which starts when the call is sent (a PendingReply)."""

    async def sent(self) -> None: ...


class SimulatedHandle:
    """One replica: the calls of its function, in their modelled seconds, one after the other."""

    def __init__(self, cluster: SimulatedCluster, name: str, slot: int, life: int) -> None:
        self._cluster = cluster
        self.name, self.slot, self.life = name, slot, life
        self._incarnation = f"{cluster.setup.functions[slot]}-{slot}-life{life}"
        self._busy_s = 0.0
        self._step = 0
        """The step that it has worked for last."""
        self.awake = self.dead = self._hung = False
        self._loaded: WeightVersion | None = None
        """The weights of an actor."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._requests: list[Any] = []
        setup = cluster.setup
        self._slot_setup = setup.slot_setups[slot]
        self._shape: Any = (*setup.actors, *setup.services, setup.learner)[slot]
        """The ActorShape, ServiceShape or LearnerShape of its slot."""
        self._model = TrainedModel()
        """What a trained function has learned."""

    def call(self, method: str, *arguments: Any, **keywords: Any) -> PendingAnswer:
        """See rlhfless.fleet.handles.Handle."""
        answer = PendingAnswer(self._alive(getattr(self, f"do_{method}"), *arguments, **keywords))
        self._tasks.add(answer)
        answer.add_done_callback(self._ended)
        return answer

    def _ended(self, task: asyncio.Task[Reply[Any]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have given up

    def stream(self, method: str, *arguments: Any) -> AsyncIterator[Any]:
        """See rlhfless.fleet.handles.Handle."""
        events: AsyncIterator[Any] = getattr(self, f"do_{method}")(*arguments)
        return events

    async def _alive(self, body: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run the body of a call. Raises HandleLost if the replica is dead, or dies."""
        if self.dead:
            raise HandleLost(f"{self.name} is dead")
        try:
            return await self._delivered(await body(*arguments, **keywords))
        except asyncio.CancelledError:
            if self.dead:
                raise HandleLost(f"{self.name} died") from None
            raise

    async def _delivered(self, value: Value) -> Value:
        """Return what the caller gets; never, if it does not get it."""
        if self._hung or self._cluster.drawn.loses_answer():
            await asyncio.get_running_loop().create_future()
        return value

    def occupy(self) -> None:
        """Take the memory of the devices, which no other function may have."""
        if not self.dead:
            self.awake = True
            others = [other.name for other in self._cluster.sharing(self)]
            self._require(not others, f"{self.name} wakes, and {others} have the memory of its devices")

    def hang(self) -> None:
        """Stop answering, and generating."""
        self._hung = True
        self._cluster.engines.crash(self.slot, self.life)

    def die(self) -> None:
        """Lose the process, with all that it has generated but not delivered."""
        if self.dead:
            return
        self.dead, self.awake = True, False
        self._cluster.engines.crash(self.slot, self.life)
        self._model.close()
        for task in [*self._tasks]:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its start: it then raises HandleLost
        for request in self._requests:
            if not request.ended.done():
                request.ended.set_exception(HandleLost(f"{self.name} died"))
                request.ended.exception()  # nobody may read it any more

    async def _late(self) -> None:
        """Wait if this call is a slow one."""
        if delay_s := self._cluster.drawn.delay_s():
            await asyncio.sleep(delay_s)

    async def _work(self, seconds: float, value: Any, usage: CallUsage = NOTHING_USED) -> Reply[Any]:
        """Answer after `seconds` of work, which begin when earlier calls have ended."""
        start_s = max(unix_s(), self._busy_s)
        self._busy_s = end_s = start_s + seconds + self._cluster.drawn.delay_s()
        if (wait_s := end_s - unix_s()) > 0:
            await asyncio.sleep(wait_s)
        return Reply(self._incarnation, value, start_s, end_s, usage)

    def _now(self, value: Any) -> Reply[Any]:
        now_s = unix_s()
        return Reply(self._incarnation, value, now_s, now_s)

    # -- all functions

    async def do_describe(self, call: Call) -> Reply[Any]:
        await self._late()
        return self._now(ReplicaInfo(self._incarnation, 1, "simulated", step=self._model.state.step))

    async def do_renew(self, call: Call) -> Reply[Any]:
        await self._late()
        return self._now(None)

    async def do_stop(self, call: Call) -> Reply[Any]:
        return self._now(None)

    async def do_sleep(self, call: Call, tier: SleepTier) -> Reply[Any]:
        reply = await self._work(self._slot_setup.sleep_s, Slept(tier, 1, 0))
        self.awake, self._loaded = False, None
        return reply

    async def do_wake(self, call: Call) -> Reply[Any]:
        self.occupy()
        return await self._work(self._slot_setup.wake_s, None)

    # -- generation

    async def do_load(self, call: Call, published: PublishedWeights, *, in_flight: bool) -> Reply[Any]:
        self._require(published.version.label in self._cluster.published, f"{published.version} was not published")
        wake_s, start_s = 0.0 if self.awake else self._slot_setup.wake_s, unix_s()
        self.occupy()
        if wake_s:
            await asyncio.sleep(wake_s)
        await self._late()
        load_s, engines = self._cluster.loaded_s(self.slot, published.version.label) - unix_s(), self._cluster.engines
        if in_flight:
            load_s += engines.reload(self.slot, self.life, load_s) - unix_s()
        else:
            engines.drop_kv(self.slot, self.life)
        await asyncio.sleep(load_s)
        self._loaded = published.version
        usage = CallUsage(size_bytes=self._cluster.setup.transport.size_bytes)
        return Reply(self._incarnation, Loaded("", None, 1), start_s, unix_s(), usage)

    async def do_generate(self, call: Call, request: Any) -> AsyncIterator[Any]:
        if self.dead:
            raise HandleLost(f"{self.name} is dead")
        self._check_weights(call, request)
        await self._delivered(None)
        start_s, engines = unix_s(), self._cluster.engines
        engine = engines.engine(call.step, self.slot, self.life)
        engine.submit(request.numbers, start_s)
        self._requests.append(request)
        try:
            while not request.ended.done():
                await asyncio.wait([request.ended], timeout=self._cluster.drawn.beat_s())
                if not await self._delivered(request.ended.done()):
                    yield Progress(self._incarnation, {})
            end_s: float = request.ended.result()
        finally:
            self._requests.remove(request)
            if not request.ended.done():
                engines.withdraw(engine, request.numbers)
        done = engine.settle()
        usage = CallUsage(
            input_tokens=done["prefilled"] + done["cached"],
            output_tokens=done["decoded"],
            cached_tokens=done["cached"],
            evicted_tokens=done["evicted"],
            sequences=len(request.numbers),
        )
        yield StreamEnd(Reply(self._incarnation, None, start_s, end_s, usage))

    async def do_answered(self, call: Call, sample: int) -> Reply[Any]:
        """Answer when the environment has answered a sample."""
        ready_s = float(self._cluster.engines.progress(call.step).table.sample["ready_s"][sample])
        await asyncio.sleep(max(ready_s - unix_s(), 0.0))
        return self._now(None)

    async def do_precompute(self, call: Call, request: PrecomputeRequest) -> Reply[Any]:
        """Put prefixes into the engine's cache."""
        engine = self._cluster.engines.engine(call.step, self.slot, self.life)
        prefixes: Any = request.prefixes
        done = engine.precompute(prefixes, unix_s(), MOVE_S.value)
        await asyncio.sleep(done.end_s - unix_s())
        tokens, cached = done.computed_tokens + done.cached_tokens, done.cached_tokens
        usage = CallUsage(input_tokens=tokens, cached_tokens=cached, sequences=len(prefixes))
        return Reply(self._incarnation, (), done.start_s, done.end_s, usage)

    def _check_weights(self, call: Call, request: Any) -> None:
        """Require the weights that were asked for, and none of the step itself or later."""
        has, asked = self._loaded, WeightVersion.parse(request.version)
        fits = has is not None and asked.step <= has.step < call.step
        self._require(fits, f"{self.name} has {has}; step {call.step} asks for {asked}")

    def _require(self, holds: bool, text: str) -> None:
        """Raise AssertionError, and note what must not happen."""
        if not holds:
            self._cluster.broken.append(text)
            raise AssertionError(text)

    async def do_abort(self, call: Call, numbers: Any) -> Reply[Any]:
        """Take samples out of the engine at its next boundary."""
        await self._late()
        engine = self._cluster.engines.engine(call.step, self.slot, self.life)
        self._cluster.engines.let_go(call.step, np.asarray(numbers, np.int64))
        samples = np.intersect1d(np.asarray(numbers, np.int64), engine.resident)
        at_s = engine.abort(samples, unix_s())
        await asyncio.sleep(at_s - unix_s() + MOVE_S.value)
        samples = samples[~engine.progress.finished[samples]]
        for request in [request for request in self._requests if request.step == call.step]:
            request.aborted(np.intersect1d(samples, request.numbers))
        return self._now(None)

    # -- services and learner

    async def do_score(self, call: Call, groups: Sequence[Any]) -> Reply[Any]:
        return await self._serve(groups)

    async def do_compute(self, call: Call, batch: Any) -> Reply[Any]:
        return await self._serve(batch)

    async def _serve(self, groups: Sequence[Any]) -> Reply[Any]:
        shape, forward = self._shape, self._cluster.setup.prefixes.forward
        if shape.work is Work.SCORE:
            return await self._work(shape.group_s * len(groups), groups)
        tokens, saved = sum(group.tokens for group in groups), 0
        if forward is not None:
            saved = groups[0].batch.saved_tokens(np.array([group.number for group in groups]), forward)
        seconds = shape.group_s * len(groups) + shape.token_s * (tokens - saved)
        return await self._work(seconds, groups, CallUsage(input_tokens=tokens, cached_tokens=saved))

    async def do_evaluate(self, call: Call, batch: Any) -> Reply[Any]:
        return await self._pass_over(call, batch, 0.0, self._shape.evaluate_token_s, 1)

    async def do_learn(self, call: Call, batch: Any, passes: Any) -> Reply[Any]:
        return await self._model.learn(call, batch, lambda: self._learn(call, batch))

    async def _learn(self, call: Call, batch: Any) -> Reply[Any]:
        shape = self._shape
        if isinstance(shape, ServiceShape):
            return await self._pass_over(call, batch, shape.update_fixed_s, shape.update_token_s, shape.epochs)
        return await self._pass_over(call, batch, shape.fixed_s, shape.learn_token_s, shape.epochs)

    async def _pass_over(self, call: Call, batch: Any, fixed_s: float, token_s: float, epochs: int) -> Reply[Any]:
        """Compute a batch `epochs` times."""
        self._come_back(call.step)
        tokens, saved = batch.tokens * epochs, self._saved(batch) * epochs
        usage = CallUsage(input_tokens=tokens, cached_tokens=saved)
        return await self._work(fixed_s + token_s * (tokens - saved), {}, usage)

    def _come_back(self, step: int) -> None:
        """Let the first work of a step wait for a learner that has given its devices back since the last one.

        It has stored its state after its last work, and restores it now. Where generation is longer, it takes no time.
        """
        around = self._shape.paid_around if isinstance(self._shape, LearnerShape) else None
        if around is not None and self._step not in (0, step):
            self._busy_s += sum(around)
        self._step = step

    def _saved(self, batch: Any) -> int:
        """Return the tokens that one pass over a batch saves by computing shared prefixes once."""
        forward, parts = self._cluster.setup.prefixes.forward, self._cluster.setup.learner.parts
        if forward is None:
            return 0
        groups = np.array_split(np.array(sorted(batch.groups)), min(parts, len(batch.groups)))
        return sum(batch.batch.saved_tokens(part, forward) for part in groups)

    async def do_publish(self, call: Call) -> Reply[Any]:
        await asyncio.sleep(0)  # after `learn` of the step
        await self._model.wait_learned(call.step, PUBLISH_WAITS_S)
        state = self._model.state
        self._require(
            not state.steps or state.step == call.step,
            f"the weights of step {state.step} are published as step {call.step}",
        )
        published = version_of(call, state)
        self._cluster.published.add(published.version.label)
        return await self._work(self._shape.publish_s, published)

    # -- checkpoints, which take no time

    async def do_check_shared_storage(self, call: Call, token: str) -> Reply[Any]:
        return self._now(())

    async def do_checkpoint(self, call: Call, location: str, notes: Any, background: bool) -> Reply[Any]:
        await self._late()
        self._cluster.checkpoints.write(location, self._model.state, notes)
        return self._now(False)

    async def do_restore(self, call: Call, location: str) -> Reply[Any]:
        await self._late()
        await self._model.restore(self._cluster.checkpoints.read(location))
        return self._now(None)
