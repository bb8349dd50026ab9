"""The parts of a run that a step uses: pools of functions, published weights, ledger. Each stage is one method."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless.algorithms.batch import PackedBatch, by_sample, pack
from rlhfless.autoscaling.scaler import Scaler
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.loop.actor_weights import ActorWeights
from rlhfless.loop.algorithm_state import AlgorithmState
from rlhfless.loop.failures import added_up, readable
from rlhfless.loop.generation import GenerationStage
from rlhfless.loop.ledger import Ledger
from rlhfless.loop.rollout_request import RolloutRequest, sampling_of
from rlhfless.loop.stages import ComputeColumn, ScoredGroups, ScoreGroups
from rlhfless.loop.step_context import StepClock, StepContext
from rlhfless.prepare.prompts import PromptOrder
from rlhfless.records import (
    Experience,
    FloatArray,
    FunctionRole,
    Group,
    Prompt,
    PublishedWeights,
    StepRecord,
    WeightVersion,
    Work,
)
from rlhfless.records.checkpoints import CheckpointError, CheckpointNotes, Checkpoints
from rlhfless.records.journal import Journal
from rlhfless.spec import RunSpec
from rlhfless.tasks import gather_or_cancel
from rlhfless.telemetry.sinks import MetricSinks
from rlhfless.weights.monitor import RolloutMonitor

log = logging.getLogger(__name__)

HELD_OUT_SEED_STEP = -1
"""All evaluations draw with the same seeds, so that they differ by the weights alone."""


@dataclass
class Run:
    """A run in progress."""

    run_id: str
    attempt: int
    spec: RunSpec
    order: PromptOrder
    held_out: Sequence[Prompt]
    pools: Mapping[str, ReplicaPool]
    """By name: the replicas of each function of this run."""
    weights: ActorWeights
    scaler: Scaler
    ledger: Ledger
    sinks: MetricSinks
    journal: Journal
    checkpoints: Checkpoints
    monitor: RolloutMonitor
    before: Mapping[str, float] = field(default_factory=dict)
    """Held-out figures before the first step."""
    latest: dict[str, float] = field(default_factory=dict)
    """The metrics that were measured last, by name."""
    published: PublishedWeights = field(init=False)
    """The newest weights; first set by `open_weights`."""
    clock: StepClock = field(default_factory=StepClock)
    under_way: dict[int, StepContext] = field(default_factory=dict)
    """The steps in progress, by number."""
    algorithms: AlgorithmState = field(init=False)
    """The algorithm that the spec selects, as of each step."""

    def __post_init__(self) -> None:
        self.algorithms = AlgorithmState(self.spec.algorithm)

    def with_role(self, *roles: FunctionRole) -> tuple[ReplicaPool, ...]:
        """The pools of the functions with one of these roles."""
        return tuple(pool for pool in self.pools.values() if pool.kind.role in roles)

    @property
    def generation(self) -> ReplicaPool:
        """The generation actors."""
        (pool,) = self.with_role(FunctionRole.SAMPLES)
        return pool

    @property
    def learner(self) -> ReplicaPool:
        (pool,) = self.with_role(FunctionRole.UPDATES)
        return pool

    @property
    def helpers(self) -> tuple[ReplicaPool, ...]:
        """The pools of functions that work on complete groups, and are idle between two steps."""
        return self.with_role(FunctionRole.SCORES, FunctionRole.COLUMN)

    def call(self, step: int) -> Call:
        """The identity that all calls of a step carry."""
        return Call(self.run_id, self.attempt, step)

    # -- weights

    async def open_weights(self, step: int) -> None:
        """Publish the learner's weights as the version of `step`, and a perturbed version of them."""
        self.weights.perturbed = await self.publish(self.call(step), perturbed=True)
        self.published = await self.publish(self.call(step))

    # -- generation

    def begin(self, step: int) -> StepContext:
        """Begin a step, or do it again; the context says which samples it draws, with which seeds and weights."""
        self.weights.served = self.published  # actors that wake for this step load it
        begun = self.clock.begin(step, fleet_is_up=bool(self.generation.settled()))
        context = self.under_way[step] = StepContext(begun, self._request_of(step), self.published)
        return context

    def _request_of(self, step: int) -> RolloutRequest:
        spec = self.spec
        return RolloutRequest(
            call=self.call(step),
            prompts=tuple(self.order.batch(step - 1, spec.prompts_per_step)),
            samples_per_prompt=spec.samples_per_prompt,
            sampling=sampling_of(spec),
            version=self.published.version.label,
            work=Work.GENERATE,
            seed=spec.seed,
            seed_step=step,
        )

    def held_out_request(self, step: int, *, greedy: bool) -> RolloutRequest:
        """The samples of an evaluation."""
        spec = self.spec
        return RolloutRequest(
            call=self.call(step),
            prompts=tuple(self.held_out),
            samples_per_prompt=1 if greedy else spec.evaluation.samples_per_prompt,
            sampling=sampling_of(spec, greedy=greedy),
            version=self.published.version.label,
            work=Work.HELD_OUT,
            seed=spec.seed,
            seed_step=HELD_OUT_SEED_STEP,
        )

    def generate(self, request: RolloutRequest, *, again: bool = False) -> GenerationStage:
        """The generation of a step or of an evaluation, or what a step draws `again`. An evaluation takes nothing from
        the journal. The trace is written while the engines are at work."""
        stage = GenerationStage(
            self.generation,
            request,
            self.spec,
            self.scaler.even_split() if again else self.scaler.runner_of(request.call.step, request.work),
            self.journal if request.work is Work.GENERATE else None,
            at_work=lambda: self.ledger.keep_up(self.pools.values(), 0.0),
            no_weights=self._no_weights,
            moves=self.scaler.moves,
        )
        self.generation.watch(stage)
        return stage

    def _no_weights(self) -> str:
        """Why no actor can load the newest weights any more; empty if one can."""
        served = "://" in self.published.location
        return "the learner, which serves them, was lost" if served and not self.learner.replicas() else ""

    # -- functions that work on complete groups

    def scoring_of(self, call: Call) -> ScoreGroups:
        """The scoring stage of a step. A replica that was released is started again; the ledger records the start."""

        async def parts(pool: ReplicaPool, groups: Sequence[Group]) -> ScoredGroups:
            return await self._work(await pool.ready(call), Work.SCORE, "score", call, groups)

        async def score(groups: Sequence[Group]) -> ScoredGroups:
            pools = self.with_role(FunctionRole.SCORES)
            scored = await gather_or_cancel(*(parts(pool, groups) for pool in pools))
            return added_up(groups, scored, self.spec.scoring)

        return score

    def columns_of(self, call: Call) -> dict[str, ComputeColumn]:
        """The stages of a step that compute a column, by its name."""

        def stage(pool: ReplicaPool) -> ComputeColumn:
            async def computed(groups: Sequence[Group]) -> list[list[FloatArray]]:
                replica = await pool.ready(call)
                batch = pack(readable(groups))
                values = await self._work(replica, Work.LOGPROBS, "compute", call, batch)
                return by_sample(batch, values, groups)

            return computed

        return {pool.kind.column: stage(pool) for pool in self.with_role(FunctionRole.COLUMN)}

    def release_idle(self, step: int) -> None:
        """Let the policy keep or release the helpers, which have finished their work of this step."""
        for pool in self.helpers:
            self.scaler.idle(pool.function, step)

    # -- learner

    @property
    def _the_learner(self) -> Replica:
        """Raises ReplicaLost if the learner is gone: a new learner has the initial weights until it is restored."""
        replicas = self.learner.replicas()
        if not replicas:
            raise ReplicaLost("the learner was lost; restarting from the latest checkpoint")
        return replicas[0]

    async def evaluate(self, call: Call, batch: PackedBatch) -> FloatArray:
        """Old logprobs `[tokens]`: the policy before the first update of the step."""
        return await self._work(self._the_learner, Work.EVALUATE, "evaluate", call, batch)

    async def learn(self, call: Call, batch: PackedBatch, sent: asyncio.Event | None = None) -> Mapping[str, float]:
        """The optimiser steps of one training step. `sent` is set when the call has left the driver."""
        # There are fewer mini-batches if dropped samples leave fewer groups.
        mini_batches = min(self.spec.mini_batches, batch.denominators.groups)
        return await self._work(self._the_learner, Work.LEARN, "learn", call, batch, mini_batches, sent=sent)

    async def publish(
        self, call: Call, *, perturbed: bool = False, sent: asyncio.Event | None = None
    ) -> PublishedWeights:
        """Write the learner's weights, or a perturbed version of them, to the store, as the version of `call`'s step.

        If it is called together with `learn` of that step, the learner runs both in order, with no round trip to the
        driver in between.
        """
        return await self._work(self._the_learner, Work.PUBLISH, "publish", call, perturbed=perturbed, sent=sent)

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        """Save the weights after `step`, with everything that a resumed run needs. `begun` is set when the learner is
        free for the next step. Raises CheckpointError."""
        notes = CheckpointNotes(
            run_id=self.run_id,
            attempt=self.attempt,
            step=step,
            digest=self.published.version.digest,
            score=self.latest.get(self.spec.checkpoint.best_by),
            before=self.before,
            kl_coefficient=self.algorithms.coefficient_after(step),
        )
        self.clock.interrupt()
        self.ledger.write(self.pools.values())  # a resumed run does not do these steps again
        call, learner, location = self.call(step), self._the_learner, self.checkpoints.location(step)
        arguments = (location, notes.as_json(), self.spec.checkpoint.background)
        later = await self._work(learner, Work.CHECKPOINT, "checkpoint", call, *arguments)
        begun.set()
        if later:
            limit_s = self.spec.timeouts.call_s
            await learner.call("wait_written", call, timeout_s=limit_s, waiting_for=f"the checkpoint of step {step}")
        self.checkpoints.prune()
        self.journal.forget(step)

    async def restore(self) -> int:
        """Load the newest checkpoint into the learner, or the initial model if there is none; returns its step."""
        newest = self.checkpoints.newest()
        if newest is None:
            await self.learner.stop(*(replica for replica in self.learner.replicas() if replica.learned_step))
            await self._require_shared(await self.learner.ready(self.call(0)))
            self.algorithms.restore(0, None)
            return 0
        step = newest.notes.step
        replica = await self.learner.ready(self.call(step))
        await self._require_shared(replica)
        await self._work(replica, Work.RESTORE, "restore", self.call(step), newest.location)
        self.before = newest.notes.before
        self.algorithms.restore(step, newest.notes.kl_coefficient)
        return step

    async def move_learner(self) -> None:
        """Start the learner on another node, from the newest checkpoint: its own node leaves."""
        log.info("the learner moves, because its node leaves")
        await self.learner.stop(*self.learner.replicas())
        await self.open_weights(await self.restore())

    async def _require_shared(self, learner: Replica) -> None:
        """Raises CheckpointError if the learner, on whichever nodes it is, does not see the checkpoints of the run."""
        with self.checkpoints.token() as token:
            limit_s = self.spec.timeouts.call_s
            faults = await learner.call(
                "check_shared_storage",
                self.call(0),
                token,
                timeout_s=limit_s,
                waiting_for="the checkpoint storage check",
            )
        if faults:
            raise CheckpointError(
                f"the learner cannot use {token.rpartition('/')[0]}, where this run keeps its checkpoints "
                f"({'; '.join(faults)}). Set checkpoint.url to a folder that its nodes share, or to an object store"
            )

    async def _work(  # type: ignore[no-untyped-def]
        self, replica: Replica, work: Work, method: str, call: Call, *arguments: object, **keywords: Any
    ):
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

    # -- ledger

    def take(self, step: int, experience: Experience) -> None:
        """Put the rollouts into the ledger, and update the estimates of engine speed. A step that is done again counts
        once."""
        if not self.ledger.has_rollouts_of(step):
            for group in (*experience.groups, *experience.greedy):
                self.ledger.add_group(step, group)
            self.scaler.learn_speeds(step)

    def close_step(self, record: StepRecord, experience: Experience) -> None:
        """Put the step into the ledger, and show its figures."""
        self.scaler.end_step(record)
        self.latest.update(record.metrics)
        others_since_s = self.clock.end(record.step, record.end_s)
        if not self.ledger.has_step(record.step):
            self.ledger.add_step(record, others_since_s)
            lengths = [sample.model_tokens for sample in experience.samples]
            self.sinks.emit(record.step, record.metrics, {"response_tokens": lengths})
        self.ledger.catch_up(self.pools.values())
        self.under_way.pop(record.step, None)

    def check_rollouts(self, record: StepRecord, drawn_with: WeightVersion) -> None:
        """Check the weights of a step by its samples; raises WeightCheckFailed. A step in which nothing was learned is
        not checked."""
        difference_nats = record.metrics.get("rollout_logprob_difference")
        warning = None if difference_nats is None else self.monitor.observe(drawn_with, difference_nats)
        if warning is not None:
            log.warning("step %d: %s", record.step, warning)
