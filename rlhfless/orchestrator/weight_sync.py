"""Sync weights: choose the version that a step generates with (`VersionGate`), and load it into actors with checks.

Engines that load between steps use one version for all samples in progress:

    async with versions.generating(oldest=3) as published:
        ...   # engines may be synced to `published`, and keep it

A step that uses the current version joins the steps in progress. A step that needs another version waits until these
have ended, and later steps queue behind it, so no step starves. It gets the newest version at the end of its wait.
Engines that load in flight need no gate, except for weights that are not a version of the run, such as its average:
these are never mixed with others. A new learner repeats earlier steps and publishes their weights again; a step for
which these are too old waits for newer ones without blocking other steps.

An actor serves only after a verified load by `ActorWeights`. With `weights.transport: cuda_ipc`, the learner's ranks
feed the engines on their GPUs during the load (rlhfless.weights.buckets); loads that start together share a feed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import Loaded
from rlhfless.records import FunctionRole, PublishedWeights, ReplicaState, WeightVersion, Work
from rlhfless.scaling.fleet_constants import TIERS
from rlhfless.scaling.placement import Device
from rlhfless.spec import RunSpec
from rlhfless.util.clock import monotonic_s
from rlhfless.util.tasks import beside, gather_or_cancel

log = logging.getLogger(__name__)


class VersionGate:
    """Tracks the newest weights of a run, and the version that engines generate with."""

    def __init__(self, *, in_flight: bool = False) -> None:
        self._in_flight = in_flight
        self._newest: PublishedWeights | None = None
        self._in_use: PublishedWeights | None = None
        self._apart = False
        """Whether the weights in use are not a version of the run, such as its average."""
        self._users = 0
        self._entrance = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()

    @property
    def newest(self) -> PublishedWeights:
        """The weights published last."""
        assert self._newest is not None, "the first version is published before generation starts"
        return self._newest

    @newest.setter
    def newest(self, published: PublishedWeights) -> None:
        self._newest = published
        self._changed.set()

    @contextlib.asynccontextmanager
    async def generating(self, oldest: int, apart: PublishedWeights | None = None) -> AsyncIterator[PublishedWeights]:
        """Hold a version within the block: the newest, once it is of step `oldest` or later, or `apart` if given."""
        published = None
        while published is None:
            await self._until(lambda: self.newest.version.step >= oldest)
            published = await self._enter(oldest, apart)
        try:
            yield published
        finally:
            self._users -= 1
            self._changed.set()

    async def newer_than(self, version: WeightVersion) -> PublishedWeights:
        """Wait for a version of a later step. Versions that a new learner publishes again do not count."""
        await self._until(lambda: self.newest.version.step > version.step)
        return self.newest

    async def _enter(self, oldest: int, apart: PublishedWeights | None) -> PublishedWeights | None:
        """Wait until the newest version may be used, and join its users; return None if it is now too old."""
        async with self._entrance:
            mixed = self._in_flight and apart is None
            await self._until(
                lambda: not self._users or self._in_use == (apart or self.newest) or (mixed and not self._apart)
            )
            if self.newest.version.step < oldest:
                return None
            self._in_use, self._apart = apart or self.newest, apart is not None
            self._users += 1
            return self._in_use

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


TOGETHER_S = 0.05
"""Loads that start within this time share a feed. The loads of a sync start together."""

OFFER_POLL_S = 0.5

T = TypeVar("T")


class LearnerLost(ReplicaLost):
    """The learner is gone, does not answer, or has started another step while it fed weights to engines."""


class Feeding:
    """Lets the learner feed its weights to generation actors during their loads."""

    def __init__(self, learner: ReplicaPool, timeout_s: float) -> None:
        self._learner = learner
        self._timeout_s = timeout_s
        self._waiting: list[Replica] = []
        """The actors of the next feed."""
        self._loading: list[Replica] = []
        """The actors whose loads are in progress."""
        self._next: asyncio.Task[None] | None = None
        self._feeding = asyncio.Lock()

    async def wait_offered(self, wanted: Callable[[], WeightVersion], call: Call) -> None:
        """Wait until the learner can feed the wanted version; it cannot while it learns. Raises LearnerLost."""
        while True:
            if await self._ask("offers", call, wanted()):
                return
            await asyncio.sleep(OFFER_POLL_S)

    async def during(self, load: Coroutine[Any, Any, T], actor: Replica, version: WeightVersion, call: Call) -> T:
        """Run an actor's load while the learner feeds it, and return the load's result. Raises LearnerLost, or the
        load's own error. The load has its own timeout."""
        self._waiting.append(actor)
        self._loading.append(actor)
        if self._next is None:
            self._next = asyncio.create_task(self._feed(version, call))
            self._next.add_done_callback(lambda feed: feed.cancelled() or feed.exception())  # its loads may have ended
        try:
            return await beside(load, self._shared(self._next))
        finally:
            self._loading.remove(actor)

    @staticmethod
    async def _shared(feed: asyncio.Task[None]) -> None:
        """Wait for a feed without cancelling it for its other waiters."""
        await asyncio.shield(feed)

    async def _feed(self, version: WeightVersion, call: Call) -> None:
        """Feed the waiting actors; repeat for workers that were late, until none of these actors is still loading."""
        await asyncio.sleep(TOGETHER_S)
        async with self._feeding:
            actors, self._waiting, self._next = self._waiting, [], None
            (allocation,) = self._learner.allocations
            missing = self._loading_workers(actors, allocation.devices)
            while any(missing):
                taken = await self._ask("feed", call, version, missing)
                if not taken:
                    raise LearnerLost(f"{version.label}: the learner has started another step and no longer serves it")
                loading = self._loading_workers(actors, allocation.devices)
                missing = [min(late - came, left) for late, came, left in zip(missing, taken, loading, strict=True)]
                if any(missing):
                    log.warning(
                        "%s: %d workers did not take the weights in time; fed again", version.label, sum(missing)
                    )

    def _loading_workers(self, actors: Sequence[Replica], devices: Sequence[Device]) -> list[int]:
        """Return the number of workers on each device, of the actors that are still loading."""
        on = Counter(device for actor in actors if actor in self._loading for device in actor.allocation.devices)
        return [on[device] for device in devices]

    async def _ask(self, method: str, call: Call, *arguments: object) -> Any:
        what = "the learner's part in a load of weights"
        try:
            learner = next(iter(self._learner.replicas()), None)
            if learner is None:
                raise LearnerLost(f"{what}: there is no learner")
            return await learner.call(method, call, *arguments, timeout_s=self._timeout_s, waiting_for=what)
        except (ReplicaLost, CallTimeout) as error:
            raise LearnerLost(str(error)) from error


class ActorWeights:
    """Loads published weights into the generation actors, and into their prefill actors."""

    def __init__(
        self, pool: ReplicaPool, spec: RunSpec, prefill: ReplicaPool | None = None, feeding: Feeding | None = None
    ) -> None:
        self.served: PublishedWeights | None = None
        """The version for all actors, including those that start or wake later; None before the first sync."""
        self._pool = pool
        self._pools = (pool,) if prefill is None else (pool, prefill)
        self._spec = spec
        self._feeding = feeding
        """Lets the learner feed each load; None if actors read published weights by themselves."""
        self._syncing = asyncio.Lock()
        """Held during a sync, so that concurrent steps with the same version load it once."""
        for each in self._pools:
            each.opens = self.open
        pool.wakes = self.wake
        pool.tier = lambda: TIERS[FunctionRole.SAMPLES]  # a load follows each sleep

    async def open(self, actor: Replica, call: Call) -> None:
        """Load the current version into a new actor. Raises as `load`."""
        if self._feeding is not None:
            await self._feeding.wait_offered(lambda: self._the_served.version, call)
        await self.load(actor, self._the_served, call)

    async def wake(self, actor: Replica, call: Call) -> None:
        """Wake an actor by loading the current version; the load reallocates its memory part by part.

        A sync loads it instead, so that each actor generates as soon as it has loaded, while others still load.
        """
        actor.check_kept()
        actor.mark_waking()
        actor.mark_awake()
        if self.served is not None and not self._syncing.locked():
            await self.load(actor, self.served, call)
            self._pool.notify_joined(actor)

    @property
    def _the_served(self) -> PublishedWeights:
        assert self.served is not None, "a version is published before actors serve"
        return self.served

    async def sync(self, published: PublishedWeights, call: Call, asked: asyncio.Event | None = None) -> None:
        """Load published weights into all actors that are up, and notify the pool's listeners of each. `asked` is set
        once no actor serves older weights.

        Replacements of lost actors start in the background. Only if no actor is up, this waits for one and raises the
        error of its start. Wrong weights in a new actor are raised at the next sync.
        """
        start_s = monotonic_s()
        for pool in self._pools:
            if pool.fatal is not None:
                raise pool.fatal
        async with self._syncing:
            self.served = published
            async with self._pool.turn(call):
                await self._sync(published, call, asked or asyncio.Event())
        loaded, seconds = len(self._pool.serving()), monotonic_s() - start_s
        log.info("step %d: %d actors serve weights %s (%.2f s)", call.step, loaded, published.version.label, seconds)

    async def _sync(self, published: PublishedWeights, call: Call, asked: asyncio.Event) -> None:
        for pool in self._pools:
            pool.replace_missing(call)
        await self._pool.wait_any_up()
        up = [(pool, actor) for pool in self._pools for actor in pool.up()]
        for _, actor in up:
            actor.ask(published.version)  # no work until this version is loaded
        asked.set()
        await gather_or_cancel(*(self._bring(pool, actor, call) for pool, actor in up))

    async def _bring(self, pool: ReplicaPool, actor: Replica, call: Call) -> None:
        """Load the current version into one actor; replace the actor if it dies meanwhile.

        Raises ReplicaLost if no generation actor is up: replacements might die of the same weights.
        """
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
            log.warning("%s died while it loaded weights; it is replaced: %s", actor.name, lost)
            pool.replace_missing(call)
            pool.notify_missed(pool.slot_of(actor))
        if actor.state is ReplicaState.SERVING:
            pool.notify_joined(actor)

    async def load(self, actor: Replica, published: PublishedWeights, call: Call) -> None:
        """Load a version into one actor, which then is SERVING. Does nothing if the actor serves the version already.

        No other method makes an actor serve. Raises WeightCheckFailed, CallTimeout, or ReplicaLost.
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
        if actor.record_start(call) and self._spec.weights.read_back and loaded.read_back < published.tensors:
            log.warning(
                "%s: only %d of %d weight tensors can be read back; only the probe checks the others",
                actor.name,
                loaded.read_back,
                published.tensors,
            )
        # A concurrent load may have marked the actor already, as when it starts during a sync; or it was drained.
        if actor.state is ReplicaState.STALE:
            actor.mark_loaded(published.version)
