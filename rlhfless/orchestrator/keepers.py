"""The functions that keep the state of a run: the learner, and a critic if there is one.

A checkpoint of a step has the state of all of them, or it is none. So they always go on from the same step: when one is
lost, all are restored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.records import Work
from rlhfless.records.checkpoints import Checkpoint, CheckpointError, CheckpointNotes, Checkpoints
from rlhfless.spec import RunSpec

log = logging.getLogger(__name__)


class Keepers:
    """The pools of these functions, each with one replica."""

    def __init__(self, pools: Sequence[ReplicaPool], spec: RunSpec, work: Callable[..., Awaitable[Any]]) -> None:
        """`pools` in the order in which they are updated: the one that publishes is the last. `work`: see Run.work."""
        self.pools = tuple(pools)
        self._spec = spec
        self._work = work

    @property
    def publisher(self) -> ReplicaPool:
        """The learner: the pool whose weights the engines load."""
        (pool,) = (pool for pool in self.pools if pool.kind.publishes)
        return pool

    @property
    def others(self) -> tuple[ReplicaPool, ...]:
        """The pools whose weights nobody else loads."""
        return tuple(pool for pool in self.pools if not pool.kind.publishes)

    @property
    def all_there(self) -> bool:
        """Whether none is lost."""
        return all(pool.replicas() for pool in self.pools)

    @property
    def must_move(self) -> bool:
        """Whether the node of one leaves the cluster."""
        return any(pool.must_move for pool in self.pools)

    def replica(self, pool: ReplicaPool) -> Replica:
        """Raises ReplicaLost if it is gone: a new one has the initial weights until it is restored."""
        replicas = pool.replicas()
        if not replicas:
            raise ReplicaLost(f"the {pool.function} was lost; restarting from the latest checkpoint")
        return replicas[0]

    async def update_others(self, call: Call, batch: PackedBatch) -> dict[str, float]:
        """The updates of one training step that come before the policy's; returns their metrics."""
        metrics: dict[str, float] = {}
        for pool in self.others:
            metrics |= await self.learn(pool, call, batch)
        return metrics

    async def learn(
        self, pool: ReplicaPool, call: Call, batch: PackedBatch, sent: asyncio.Event | None = None
    ) -> Mapping[str, float]:
        """The optimiser steps of one function in one training step. `sent` is set when the call has left the driver."""
        spec = self._spec
        # There are fewer mini-batches if dropped samples leave fewer groups.
        count = min(spec.mini_batches, batch.denominators.groups)
        epochs, planned = spec.epochs_of(pool.function), spec.planned_updates(pool.function)
        passes = Passes(count, epochs, (spec.seed, call.step), planned)
        metrics: Mapping[str, float] = await self._work(
            self.replica(pool), Work.LEARN, "learn", call, batch, passes, sent=sent
        )
        return metrics

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a checkpoint beside the publisher's own."""
        return tuple(pool.function for pool in self.others)

    async def checkpoint(self, call: Call, checkpoints: Checkpoints, notes: CheckpointNotes) -> list[Replica]:
        """Begin to save the state after `call`'s step; when it returns all are free for the next step. Returns those
        that are still writing. Raises CheckpointError."""
        later = []
        for pool in self.pools:
            replica, location = self.replica(pool), checkpoints.location(call.step, _part(pool))
            arguments = (location, notes.as_json(), self._spec.checkpoint.background)
            if await self._work(replica, Work.CHECKPOINT, "checkpoint", call, *arguments):
                later.append(replica)
        return later

    async def wait_written(self, writing: Sequence[Replica], call: Call) -> None:
        """Wait until the parts of a checkpoint are complete. Raises CheckpointError."""
        limit_s, what = self._spec.timeouts.call_s, f"the checkpoint of step {call.step}"
        for replica in writing:
            await replica.call("wait_written", call, timeout_s=limit_s, waiting_for=what)

    async def restore(self, call: Call, checkpoints: Checkpoints, saved: Checkpoint | None) -> None:
        """Load a checkpoint, which is of `call`'s step, or the initial models if there is none."""
        for pool in self.pools:
            if saved is None:
                await pool.stop(*(replica for replica in pool.replicas() if replica.learned_step))
            replica = await pool.ready(call)
            await self._require_shared(replica, checkpoints, call)
            if saved is not None:
                location = checkpoints.location(call.step, _part(pool))
                await self._work(replica, Work.RESTORE, "restore", call, location)

    async def stop_leaving(self) -> None:
        """Stop those whose node leaves."""
        for pool in self.pools:
            if pool.must_move:
                log.info("the %s moves, because its node leaves", pool.function)
                await pool.stop(*pool.replicas())

    async def _require_shared(self, replica: Replica, checkpoints: Checkpoints, call: Call) -> None:
        """Raises CheckpointError if a function, on whichever nodes it is, does not see the checkpoints of the run."""
        limit_s, what = self._spec.timeouts.call_s, "the checkpoint storage check"
        with checkpoints.token() as token:
            faults = await replica.call("check_shared_storage", call, token, timeout_s=limit_s, waiting_for=what)
        if faults:
            raise CheckpointError(
                f"the {replica.function} cannot use {token.rpartition('/')[0]}, where this run keeps its checkpoints "
                f"({'; '.join(faults)}). Set checkpoint.url to a folder that its nodes share, or to an object store"
            )


def _part(pool: ReplicaPool) -> str:
    """The part of a checkpoint that a function writes; the publisher writes the checkpoint itself."""
    return "" if pool.kind.publishes else pool.function
