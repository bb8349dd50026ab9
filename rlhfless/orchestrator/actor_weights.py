"""Loads weights into the generation actors: an actor serves only after a load by this module.

A new actor gets work after it has proved that loads reach every tensor, and has loaded the weights of the step.
"""

from __future__ import annotations

import asyncio
import logging

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.functions.generation.deployment import Loaded, LoadProof
from rlhfless.orchestrator.feeding import Feeding, LearnerLost
from rlhfless.records import FunctionRole, PublishedWeights, ReplicaState, SleepTier, StartPhase, Work
from rlhfless.scaling.capabilities import TIERS
from rlhfless.spec import RunSpec
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)


class ActorWeights:
    """Loads published weights into the actors of a pool, and into those that prefill for them."""

    def __init__(
        self, pool: ReplicaPool, spec: RunSpec, prefill: ReplicaPool | None = None, feeding: Feeding | None = None
    ) -> None:
        self.served: PublishedWeights | None = None
        """The version for all actors, including actors that start later, or wake; None before there is one."""
        self.perturbed: PublishedWeights
        """A version whose load must move every engine's outputs; see GenerationFunction.prove_loading."""
        self._pool = pool
        self._pools = (pool,) if prefill is None else (pool, prefill)
        self._spec = spec
        self._feeding = feeding
        """The learner's part in each load; None if actors read published weights without it."""
        self._syncing = asyncio.Lock()
        """Held during a sync: steps that are drawn at once ask for the same version, and one load is enough."""
        for each in self._pools:
            each.opens = self.open
        pool.wakes = self.wake
        # A load follows each sleep; only before the first one do actors prove that loads move what they have.
        pool.tier = lambda: SleepTier.HOST if self.served is None else TIERS[FunctionRole.SAMPLES]

    async def open(self, actor: Replica, call: Call) -> None:
        """Load the current version into a new actor, after the proof of loading. Raises as `load` does."""
        await self.prove_loading(actor, call)
        if self._feeding is not None:
            await self._feeding.wait_offered(lambda: self._the_served.version, call)
        await self.load(actor, self._the_served, call)

    async def wake(self, actor: Replica, call: Call) -> None:
        """Wake an actor, and load the current version into it: a load gives it its memory back, part by part."""
        actor.mark_waking()
        actor.mark_awake()
        if self.served is not None:
            await self.load(actor, self.served, call)
            self._pool.notify_joined(actor)

    @property
    def _the_served(self) -> PublishedWeights:
        assert self.served is not None, "a version is published before actors serve"
        return self.served

    async def sync(self, published: PublishedWeights, call: Call, asked: asyncio.Event | None = None) -> None:
        """Load published weights into all actors that are up; the listeners of the pool are told of each. `asked` is
        set when no actor serves others any more: a draw that began before would be of older weights.

        Replacements of lost actors start in the background, and are waited for only if no other actor is up; then an
        error of their start is raised. Wrong weights of a new actor are raised whenever they were found.
        """
        for pool in self._pools:
            if pool.fatal is not None:
                raise pool.fatal
        async with self._syncing:
            self.served = published
            async with self._pool.turn(call):
                await self._sync(published, call, asked or asyncio.Event())

    async def _sync(self, published: PublishedWeights, call: Call, asked: asyncio.Event) -> None:
        for pool in self._pools:
            pool.replace_missing(call)
        await self._pool.wait_any_up()
        up = [(pool, actor) for pool in self._pools for actor in pool.up()]
        for _, actor in up:
            actor.ask(published.version)  # from here on, an actor gets no work before it has loaded this version
        asked.set()
        await gather_or_cancel(*(self._bring(pool, actor, call) for pool, actor in up))

    async def _bring(self, pool: ReplicaPool, actor: Replica, call: Call) -> None:
        """Load the current version into one actor. If the actor is lost meanwhile, it is replaced and the others go on.
        Raises ReplicaLost if no actor that draws is up: new actors might be lost to the same weights."""
        if actor.state is ReplicaState.SERVING:
            return
        try:
            await self.load(actor, self._the_served, call)
        except LearnerLost:
            raise
        except ReplicaLost as lost:
            if actor.state is not ReplicaState.DEAD:
                return  # it was released
            if not self._pool.up():
                raise
            log.warning("%s was lost while it loaded weights: %s", actor.name, lost)
            pool.replace_missing(call)
            pool.notify_missed(pool.slot_of(actor))
        if actor.state is ReplicaState.SERVING:
            pool.notify_joined(actor)

    async def load(self, actor: Replica, published: PublishedWeights, call: Call) -> None:
        """Load a version into one actor, the only way to SERVING. Does nothing if the actor serves it already.

        Raises WeightCheckFailed, CallTimeout, or ReplicaLost.
        """
        actor.ask(published.version)
        if actor.state is ReplicaState.SERVING:
            return
        loading = actor.call(
            "load",
            call,
            published,
            in_flight=self._spec.schedule.in_flight,
            timeout_s=self._spec.timeouts.sync_s,
            waiting_for=f"the weights of step {published.version.step}",
            work=Work.LOAD_WEIGHTS,
        )
        if self._feeding is not None:
            loading = self._feeding.during(loading, actor, published.version, call)
        loaded: Loaded = await loading
        actor.record_transport(call, loaded.transport)
        # Another `sync` may have waited for the same load, as when an actor starts during it; or the actor was drained.
        if actor.state is ReplicaState.STALE:
            actor.mark_loaded(published.version)

    async def prove_loading(self, actor: Replica, call: Call) -> None:
        """Check that loads reach every tensor of a new engine."""
        proof: LoadProof = await actor.call(
            "prove_loading",
            call,
            self.perturbed,
            timeout_s=self._spec.timeouts.sync_s,
            waiting_for="the proof that loads reach every tensor",
            work=Work.PROVE_LOADING,
        )
        opening = {StartPhase.CHART: proof.chart_s, StartPhase.FIRST_LOAD: proof.load_s}
        actor.record_start(call, {str(phase): seconds for phase, seconds in opening.items() if seconds})
        if self._spec.weights.read_back and proof.read_back < proof.tensors:
            log.warning(
                "%s can give back %d of %d weight tensors; the probe alone covers the others",
                actor.name,
                proof.read_back,
                proof.tensors,
            )
