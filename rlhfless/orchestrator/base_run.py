"""The parts that all types of runs share: pools of functions, checkpoints, the ledger.

A checkpoint counts only if it has the state of all trained functions (learner, critic). They always continue from the
same step: if one is lost, all are restored."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.ledger import Ledger, StepClock
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import FunctionRole, Prompt, ReplicaState, StepRecord, Work
from rlhfless.records.checkpoints import Checkpoint, CheckpointError, CheckpointNotes, Checkpoints
from rlhfless.records.journal import Journal
from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import MetricSinks
from rlhfless.util.clock import unix_s

log = logging.getLogger(__name__)


class TrainerPools:
    """The pools of the trained functions, each with one replica."""

    def __init__(self, pools: Sequence[ReplicaPool], spec: RunSpec, work: Callable[..., Awaitable[Any]]) -> None:
        """`pools`: in the order of their updates, with the publisher last. `work`: see BaseRun.work."""
        self.pools = tuple(pools)
        self._spec = spec
        self._work = work
        self._restored: list[Replica] | None = None
        """The replicas that have the run's state; None before the first restore."""

    @property
    def publisher(self) -> ReplicaPool:
        """The pool of the learner, which publishes its weights to the engines."""
        (pool,) = (pool for pool in self.pools if pool.kind.publishes)
        return pool

    @property
    def others(self) -> tuple[ReplicaPool, ...]:
        """The pools that publish no weights, such as a critic."""
        return tuple(pool for pool in self.pools if not pool.kind.publishes)

    @property
    def all_there(self) -> bool:
        """Whether all pools have a replica with the run's state."""
        return all(map(self.has_state, self.pools))

    def has_state(self, pool: ReplicaPool) -> bool:
        """Return whether a pool has a replica with the run's state. A replica that has started has none until it is
        restored; before the first restore, the initial model is the state."""
        replicas = pool.replicas()
        return bool(replicas) and (self._restored is None or replicas[0] in self._restored)

    @property
    def must_move(self) -> bool:
        """Whether a node with one of the replicas is leaving the cluster."""
        return any(pool.must_move for pool in self.pools)

    def replica(self, pool: ReplicaPool) -> Replica:
        """Return a pool's replica. Raises ReplicaLost if none has the run's state, because a new one must be restored
        first."""
        if not self.has_state(pool):
            raise ReplicaLost(f"the {pool.function} was lost; restarting from the latest checkpoint")
        return pool.replicas()[0]

    async def update_others(self, call: Call, batch: PackedBatch) -> dict[str, float]:
        """Update the functions that learn before the policy, and return their metrics."""
        metrics: dict[str, float] = {}
        for pool in self.others:
            metrics |= await self.learn(pool, call, batch)
        return metrics

    async def learn(
        self, pool: ReplicaPool, call: Call, batch: PackedBatch, sent: asyncio.Event | None = None
    ) -> Mapping[str, float]:
        """Run the optimiser steps of one function for a training step, and return its metrics. `sent` is set when the
        call has left the driver."""
        spec = self._spec
        # Dropped samples may leave fewer groups than mini-batches.
        count = min(spec.mini_batches, batch.denominators.groups)
        epochs, planned = spec.epochs_of(pool.function), spec.planned_updates(pool.function)
        passes = Passes(count, epochs, (spec.seed, call.step), planned)
        metrics: Mapping[str, float] = await self._work(
            self.replica(pool), Work.LEARN, "learn", call, batch, passes, sent=sent
        )
        return metrics

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a checkpoint besides the publisher's."""
        return tuple(pool.function for pool in self.others)

    async def checkpoint(self, call: Call, checkpoints: Checkpoints, notes: CheckpointNotes) -> list[Replica]:
        """Start saving the state after `call`'s step, and return the replicas that are still writing. On return, all
        are free for the next step. Raises CheckpointError."""
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
        """Load the checkpoint of `call`'s step, or the initial models if `saved` is None. After a fault, all functions
        have to be restored again."""
        self._restored = restored = list[Replica]()
        for pool in self.pools:
            if saved is None:
                await pool.stop(*(replica for replica in pool.replicas() if replica.learned_step))
            replica = await pool.ready(call)
            await self._require_shared(replica, checkpoints, call)
            if saved is not None:
                location = checkpoints.location(call.step, _part(pool))
                await self._work(replica, Work.RESTORE, "restore", call, location)
            restored.append(replica)

    def restore_again(self) -> None:
        """Let the next recovery restore all functions."""
        self._restored = []

    async def stop_leaving(self) -> None:
        """Stop the functions whose node is leaving the cluster."""
        for pool in self.pools:
            if pool.must_move:
                log.info("%s stops and restarts elsewhere: its node leaves the cluster", pool.function)
                await pool.stop(*pool.replicas())

    async def _require_shared(self, replica: Replica, checkpoints: Checkpoints, call: Call) -> None:
        """Raise CheckpointError if a node of the function cannot use the folder of the run's checkpoints."""
        limit_s, what = self._spec.timeouts.call_s, "the checkpoint storage check"
        with checkpoints.token() as token:
            faults = await replica.call("check_shared_storage", call, token, timeout_s=limit_s, waiting_for=what)
        if faults:
            raise CheckpointError(
                f"the {replica.function} cannot use {token.rpartition('/')[0]}, where this run keeps its checkpoints "
                f"({'; '.join(faults)}). Set checkpoint.url to a folder that its nodes share, or to an object store"
            )


def _part(pool: ReplicaPool) -> str:
    """Return the name of the checkpoint part that a function writes; empty for the publisher, whose part is the main
    one."""
    return "" if pool.kind.publishes else pool.function


@dataclass(kw_only=True)
class BaseRun:
    """A run in progress, of any type."""

    run_id: str
    attempt: int
    spec: RunSpec
    order: PromptOrder
    held_out: Sequence[Prompt]
    pools: Mapping[str, ReplicaPool]
    """The pool of each function, by name of the function."""
    ledger: Ledger
    sinks: MetricSinks
    journal: Journal
    checkpoints: Checkpoints
    before: Mapping[str, float] = field(default_factory=dict)
    """Held-out metrics before the first step."""
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of each metric."""
    evaluated: int = -1
    """The step of the last evaluation."""
    clock: StepClock = field(default_factory=StepClock)
    trainers: TrainerPools = field(init=False)

    def __post_init__(self) -> None:
        self.trainers = TrainerPools(self.with_role(FunctionRole.UPDATES), self.spec, self.work)

    def with_role(self, *roles: FunctionRole) -> tuple[ReplicaPool, ...]:
        """Return the pools of the functions with these roles."""
        return tuple(pool for pool in self.pools.values() if pool.kind.role in roles)

    @property
    def learner(self) -> ReplicaPool:
        """See TrainerPools.publisher."""
        return self.trainers.publisher

    @property
    def _the_learner(self) -> Replica:
        return self.trainers.replica(self.learner)

    @property
    def helpers(self) -> tuple[ReplicaPool, ...]:
        """The pools that work for samples: an environment, scoring, and functions with per-token outputs."""
        return self.with_role(FunctionRole.ANSWERS, FunctionRole.SCORES, FunctionRole.ANNOTATES)

    def call(self, step: int) -> Call:
        """Return the identity that all calls of a step carry."""
        return Call(self.run_id, self.attempt, step)

    async def work(  # type: ignore[no-untyped-def]
        self, replica: Replica, work: Work, method: str, call: Call, *arguments: object, **keywords: Any
    ):
        """Call a function within its turn on the devices, and return the method's value."""
        calls = 2 if work is Work.PUBLISH else 1  # the call may first wait for `learn`
        async with self.pools[replica.function].turn(call):
            return await replica.call(
                method,
                call,
                *arguments,
                **keywords,
                timeout_s=calls * self.spec.timeouts.call_s,
                waiting_for=f"{work} of step {call.step}",
                work=work,
            )

    async def serve(self, pool: ReplicaPool, work: Work, method: str, call: Call, argument: object) -> Any:
        """Call a helper, or a trained function that works for samples, starting it if it was released, and return the
        method's value. Raises ReplicaLost for a trained function that was lost."""
        while True:
            replica = await pool.ready(call)
            async with pool.turn(call):
                if replica.state is ReplicaState.SERVING:  # otherwise it was released while this waited for its turn
                    if pool in self.trainers.pools:
                        self.trainers.replica(pool)  # a new one lacks what a lost one has learned
                    return await replica.call(
                        method,
                        call,
                        argument,
                        timeout_s=self.spec.timeouts.call_s,
                        waiting_for=f"{work} of step {call.step}",
                        work=work,
                    )

    # -- checkpoints

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        """Save the state from which a run resumes after `step`. `begun` is set when the functions are free for the next
        step. Raises CheckpointError."""
        notes, start_s = self._notes(step), unix_s()
        self.clock.interrupt()
        self.ledger.write(self.pools.values())  # a resumed run does not repeat the steps before a checkpoint
        call = self.call(step)
        writing = await self.trainers.checkpoint(call, self.checkpoints, notes)
        begun.set()
        await self.trainers.wait_written(writing, call)
        log.info("step %d: checkpoint %s saved in %.1f s", step, self.checkpoints.location(step), unix_s() - start_s)
        self.checkpoints.prune()
        self.journal.forget(step)

    def _notes(self, step: int) -> CheckpointNotes:
        """Return the notes of a checkpoint after `step`."""
        return CheckpointNotes(
            run_id=self.run_id,
            attempt=self.attempt,
            step=step,
            digest="",
            score=self.score(step),
            before=self.before,
            metric=self.spec.checkpoint.best.metric,
            parts=self.trainers.parts,
        )

    def score(self, step: int) -> float | None:
        """Return the value of `checkpoint.best.metric` after `step`; None if it was not measured then."""
        best = self.spec.checkpoint.best
        if best.of_evaluations and self.evaluated != step:
            return None
        return self.latest.get(best.metric)

    def improves(self, step: int) -> bool:
        """Return whether the evaluation after `step` has a better score than every checkpoint."""
        best, score = self.spec.checkpoint.best, self.score(step)
        if not best.save or not best.of_evaluations or score is None or math.isnan(score):
            return False
        saved = [self.checkpoints.score(each.notes) for each in self.checkpoints.all()]
        return all(score < each if best.mode == "min" else score > each for each in saved if each is not None)

    async def restore(self) -> int:
        """Restore the newest checkpoint, or the initial models if there is none, and return its step."""
        newest = self.checkpoints.newest()
        step = newest.notes.step if newest else 0
        await self.trainers.restore(self.call(step), self.checkpoints, newest)
        if newest is not None:
            self.before = newest.notes.before
        return step

    async def open_weights(self, step: int) -> None:
        """Publish the weights of `step` after a restore of the learner. By default, does nothing."""

    @property
    def digest(self) -> str:
        """Digest of the newest weights; empty in a run that publishes none."""
        return ""

    async def publish_again(self, before: int) -> None:
        """Rewrite the weight files if their step is before `before`: damaged or missing files may have caused the
        fault."""

    async def move_trainers(self) -> None:
        """Stop trained functions on leaving nodes, and restart them elsewhere from the newest checkpoint."""
        await self.trainers.stop_leaving()
        await self.restore_and_open()

    async def restore_and_open(self) -> int:
        """Restore the newest checkpoint, open its weights, and return its step. After a fault, the next recovery does
        so again."""
        step = await self.restore()
        try:
            await self.open_weights(step)
        except BaseException:
            self.trainers.restore_again()
            raise
        return step

    # -- ledger

    def _close(self, record: StepRecord, samples: Mapping[str, Sequence[float]]) -> None:
        """Record the step in the ledger, and emit its metrics."""
        self.latest.update(record.metrics)
        others_since_s = self.clock.end(record.step, record.end_s)
        if not self.ledger.has_step(record.step):
            self.ledger.add_step(record, others_since_s)
            self.sinks.emit(record.step, record.metrics, samples)
            self.sinks.responses(record.step, self.ledger.responses(record.step))
            warn_of_skipped_updates(record)
        self.ledger.catch_up(self.pools.values())


def warn_of_skipped_updates(record: StepRecord) -> None:
    """Warn of skipped updates: a run without finite gradients continues, but learns nothing."""
    for prefix, section in (("", "optimizer"), ("critic_", "critic.optimizer")):
        if skipped := record.metrics.get(f"{prefix}skipped_updates"):
            what = "step %d: %d update(s) skipped: the gradient was not finite; try a lower %s.learning_rate"
            log.warning(what, record.step, skipped, section)
