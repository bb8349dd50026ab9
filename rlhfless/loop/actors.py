"""The generation actors of a run: their weights, and who joins and who leaves, between steps and during one.

Starts and releases go on in the background; a step never waits for them, unless nobody is left to draw. One that joins
has proved that loads reach every tensor, and has loaded the weights of the step, before it gets work. One that leaves
gets no work from then on, hands back what it has, and is stopped after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from rlhfless.fleet.cluster import FleetError
from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.fleet.tasks import together
from rlhfless.functions.base import Call
from rlhfless.functions.generation.deployment import LoadProof
from rlhfless.records import PublishedWeights, ReplicaState, Work
from rlhfless.spec import RunSpec

log = logging.getLogger(__name__)

RECOVERABLE = (ReplicaLost, CallTimeout, FleetError)
"""Faults of a machine or a process. Wrong weights, bad rewards and full disks are not mended by trying again."""


class Stage(Protocol):
    """A generation that is under way, as far as those are concerned who come and go."""

    @property
    def over(self) -> bool: ...

    def joined(self, place: int) -> None:
        """Somebody serves at a place."""

    def missed(self, place: int) -> None:
        """Nobody will come to a place."""

    async def drain(self, actor: Replica) -> None:
        """An actor hands back what it has; returns when it has."""


class Actors:
    """The pool's actors by place, which is the number of their seat."""

    def __init__(self, pool: Pool, spec: RunSpec) -> None:
        self.pool = pool
        self.published: PublishedWeights
        """What actors are to serve."""
        self.perturbed: PublishedWeights
        """A version whose load must move every engine's outputs; see GenerationFunction.prove_loading."""
        self._spec = spec
        self._stages: list[Stage] = []
        self._closed = False
        self._fatal: BaseException | None = None
        self._starts: dict[int, asyncio.Task[Replica]] = {}
        self._later: dict[int, asyncio.TimerHandle] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._next: dict[int, Call] = {}
        """Places that get a new actor as soon as the one that leaves has left."""

    def watch(self, stage: Stage) -> None:
        """Tell a stage of those that come and go, until it is over."""
        self._stages = [known for known in self._stages if not known.over] + [stage]

    def expects(self, place: int) -> bool:
        """Whether somebody serves at a place, or will."""
        return self.state(place) in (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING)

    def state(self, place: int) -> ReplicaState | None:
        """Of the actor at a place; None if there is none, or only one that leaves: another can be asked for then."""
        actor = self.pool.at(place)
        if actor is not None and actor.state is not ReplicaState.DRAINING:
            return actor.state
        return ReplicaState.STARTING if place in self._starts or place in self._next else None

    # -- weights

    async def sync(self, call: Call) -> None:
        """Bring all that are up to the published weights; a stage that is under way hears of each.

        Those that were lost are replaced beside the work of the others, and waited for only if there are none. Raises
        what their starts raised then; and wrong weights of a new one, whenever they were found.
        """
        if self._fatal is not None:
            raise self._fatal
        self._replace(call)
        while self._starts and not self.pool.up():
            done, _ = await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in done if not task.cancelled()]
            if failures and failures[-1] is not None and not self._starts and not self.pool.up():
                raise failures[-1]
        up = self.pool.up()
        for actor in up:
            actor.ask(self.published.version)  # from here on, none gets work before it has loaded them
        await together(*(self._bring(actor, call) for actor in up))

    async def _bring(self, actor: Replica, call: Call) -> None:
        """Load the published weights into one. If it is lost meanwhile the others go on, and it is replaced; raises
        ReplicaLost if no other is up: those that start might be lost to the same weights."""
        if actor.state is ReplicaState.SERVING:
            return
        try:
            await self.pool.sync_one(actor, self.published, call)
        except ReplicaLost as lost:
            if actor.state is not ReplicaState.DEAD:
                return  # it was released
            if not self.pool.up():
                raise
            log.warning("%s was lost while it loaded weights: %s", actor.name, lost)
            self._replace(call)
            for stage in self._stages:
                stage.missed(self._place_of(actor))
        if actor.state is ReplicaState.SERVING:
            self._joined(actor)

    def _replace(self, call: Call) -> None:
        """Start those in the background that are missing from `min_actors`."""
        places = range(len(self.pool.seats))
        missing = self._spec.scaling.generation.min_actors - sum(self.expects(place) for place in places)
        for place in [place for place in places if self.state(place) is None][: max(missing, 0)]:
            self.start(place, call)

    async def prove_loading(self, actor: Replica, call: Call) -> None:
        """Check that loads reach every tensor of a new engine."""
        proof: LoadProof = await actor.call(
            "prove_loading",
            call,
            self.perturbed,
            timeout_s=self._spec.timeouts.sync_s,
            waiting_for="the proof that loads reach every tensor",
            work=Work.LOAD_WEIGHTS,
        )
        if self._spec.weights.read_back and proof.read_back < proof.tensors:
            log.warning(
                "%s can give back %d of %d weight tensors; the probe alone covers the others",
                actor.name,
                proof.read_back,
                proof.tensors,
            )

    # -- who joins

    async def add(self, call: Call, place: int | None = None) -> Replica:
        """Start one more, at a place or at the first that is free; during a step it may get work at once."""
        actor = await self.pool.add(lambda new: self.prove_loading(new, call), place)
        await self.pool.sync_one(actor, self.published, call)
        self._joined(actor)
        return actor

    def _joined(self, actor: Replica) -> None:
        for stage in self._stages:
            stage.joined(self._place_of(actor))

    def start(self, place: int, call: Call, at_s: float | None = None) -> None:
        """Start one at a place in the background, not before `at_s` (unix time), and not before who leaves it has left.

        One that waits for its time is begun at once when it is asked for again without one.
        """
        if (timer := self._later.pop(place, None)) is not None:
            timer.cancel()
        wait_s = 0.0 if at_s is None else at_s - time.time()
        if wait_s > 0:
            self._later[place] = asyncio.get_running_loop().call_later(wait_s, self.start, place, call)
        elif place in self._leaving:
            self._next[place] = call
        elif self.state(place) is None and not self._closed:
            task = self._starts[place] = asyncio.create_task(self.add(call, place))
            task.add_done_callback(lambda done: self._started(place, done))

    def _started(self, place: int, task: asyncio.Task[Replica]) -> None:
        del self._starts[place]
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, RECOVERABLE):
            log.warning("no generation actor came up at place %d, which stays empty for now: %s", place, failure)
        elif failure is not None:
            self._fatal = failure
        if not self.expects(place):
            for stage in self._stages:
                stage.missed(place)

    # -- who leaves

    async def remove(self, actor: Replica) -> None:
        """Drain one and stop it; during a step its samples go on elsewhere. Raises what kept it from doing so."""
        await self._leave(actor)

    def release(self, place: int) -> bool:
        """Give a place's devices back, in the background; a start is called off. Returns False, and does nothing, if
        no more than `min_actors` are there."""
        held = sum(self.expects(i) for i in range(len(self.pool.seats)))
        if held <= self._spec.scaling.generation.min_actors:
            return False
        if (timer := self._later.pop(place, None)) is not None:
            timer.cancel()
        if self._next.pop(place, None) is not None:
            return True
        if place in self._starts:
            self._starts[place].cancel()
            return True
        actor = self.pool.at(place)
        if actor is not None:
            self._leave(actor)
        return True

    def _leave(self, actor: Replica) -> asyncio.Task[None]:
        """Let one go in the background. It gets no work from here on."""
        place = self._place_of(actor)
        actor.drain()
        if place not in self._leaving:
            task = self._leaving[place] = asyncio.create_task(self._hand_back_and_stop(actor))
            task.add_done_callback(lambda done: self._left(place, actor, done))
        return self._leaving[place]

    async def _hand_back_and_stop(self, actor: Replica) -> None:
        for stage in self._stages:
            if not stage.over:
                await stage.drain(actor)
        await self.pool.stop(actor)

    def _left(self, place: int, actor: Replica, task: asyncio.Task[None]) -> None:
        del self._leaving[place]
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.warning("%s did not leave in order: %s", actor.name, fault)
        call = self._next.pop(place, None)
        if call is not None:
            self.start(place, call)

    def _place_of(self, actor: Replica) -> int:
        return next(place for place, seat in enumerate(self.pool.seats) if seat is actor.seat)

    async def close(self) -> None:
        """Call off what is starting, and wait for what is leaving."""
        self._closed = True
        self._next.clear()
        for timer in self._later.values():
            timer.cancel()
        starts = list(self._starts.values())
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, *self._leaving.values(), return_exceptions=True)
