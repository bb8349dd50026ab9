"""A run that learns from generated samples: engines, published weights and an algorithm. Each stage of a step is a
method."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.calls import ANSWER_S, Call
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.batches import Batches, StepBatch
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.group_pipeline import ComputeOutput, ScoredGroups, ScoreGroups, zeros_of
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.ledger import StepAttempt
from rlhfless.orchestrator.prompt_selection import PromptHistory, select
from rlhfless.orchestrator.rollout_request import RolloutRequest, sampling_of
from rlhfless.orchestrator.scaler import Scaler
from rlhfless.orchestrator.stage_samples import StageSamples
from rlhfless.orchestrator.weight_sync import ActorWeights, VersionGate
from rlhfless.records import (
    Experience,
    FloatArray,
    FunctionRole,
    Group,
    PublishedWeights,
    StepRecord,
    Work,
)
from rlhfless.records.checkpoints import CheckpointNotes
from rlhfless.util.host import BusyCores
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepContext:
    """One attempt of a step, from the start of its rollout to the end of its training."""

    begun: StepAttempt
    request: RolloutRequest
    oldest: int
    """Step of the oldest weights that may generate its samples: those that were newest when it started."""
    stage: GenerationStage | None = None

    @property
    def step(self) -> int:
        return self.begun.step

    @property
    def call(self) -> Call:
        """The identity that all calls of the step carry."""
        return self.request.call


HELD_OUT_SEED_STEP = -1
"""All evaluations generate with the same seeds, so that they differ only in the weights."""


@dataclass(kw_only=True)
class RLRun(BaseRun):
    """A run that learns from samples that it generates."""

    weights: ActorWeights
    scaler: Scaler
    history: PromptHistory
    """The lengths, signals and responses of each prompt so far."""
    batches: Batches
    evaluated_samples: Callable[[int, Experience, Experience], None] = lambda *_: None
    """Called after an evaluation with the step and the scored samples: sampled, then greedy."""
    busy_cores: Callable[[], BusyCores] | None = BusyCores
    """Measures the driver's machine during generation; None in a simulation."""
    under_way: dict[int, StepContext] = field(default_factory=dict)
    """The steps in progress, by number."""
    versions: VersionGate = field(init=False)
    _outputs: dict[tuple[int, str], dict[Hashable, list[FloatArray]]] = field(default_factory=dict)
    """Per-token outputs for groups of steps in progress, by step and name of the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.versions = VersionGate(in_flight=self.spec.schedule.in_flight)

    @property
    def generation(self) -> ReplicaPool:
        (pool,) = self.with_role(FunctionRole.SAMPLES)
        return pool

    @property
    def prefill(self) -> ReplicaPool | None:
        """The prefill actors, if the spec allows any."""
        return next(iter(self.with_role(FunctionRole.PREFILLS)), None)

    @property
    def environment(self) -> ReplicaPool | None:
        """The environment that answers the model, if the spec has one."""
        return next(iter(self.with_role(FunctionRole.ANSWERS)), None)

    # -- weights

    @property
    def published(self) -> PublishedWeights:
        """The newest published weights; first set by `open_weights`."""
        return self.versions.newest

    @published.setter
    def published(self, published: PublishedWeights) -> None:
        self.versions.newest = published

    @property
    def digest(self) -> str:
        """See BaseRun."""
        return self.published.version.digest

    async def open_weights(self, step: int) -> None:
        """See BaseRun. Publishes the learner's weights as the version of `step`."""
        self.published = await self.publish(self.call(step))

    # -- generation

    def begin(self, step: int) -> StepContext:
        """Start an attempt of a step: choose its samples and their seeds."""
        begun = self.clock.begin(step, fleet_is_up=bool(self.generation.settled()))
        context = self.under_way[step] = StepContext(begun, self._request_of(step), self.published.version.step)
        return context

    def _request_of(self, step: int) -> RolloutRequest:
        spec = self.spec
        prompts, selection = select(spec, step, self.order, self.history, self.journal)
        return RolloutRequest(
            call=self.call(step),
            prompts=tuple(prompts),
            samples_per_prompt=spec.samples_per_prompt,
            sampling=sampling_of(spec),
            work=Work.GENERATE,
            seed=spec.seed,
            seed_step=step,
            selection=selection,
            row_field=self._row_field,
        )

    def held_out_request(self, step: int, *, greedy: bool) -> RolloutRequest:
        """Return the samples of an evaluation."""
        spec = self.spec
        return RolloutRequest(
            call=self.call(step),
            prompts=tuple(self.held_out),
            samples_per_prompt=1 if greedy else spec.evaluation.samples_per_prompt,
            sampling=sampling_of(spec, greedy=greedy),
            work=Work.HELD_OUT,
            seed=spec.seed,
            seed_step=HELD_OUT_SEED_STEP,
            row_field=self._row_field,
        )

    @property
    def _row_field(self) -> str:
        return "" if self.environment is None else self.spec.data.prompt_field

    def generate(self, request: RolloutRequest, *, again: bool = False) -> GenerationStage:
        """Create the generation stage of a step, of its redraws (`again`), or of an evaluation, which uses no journal.

        The ledger writes the trace when the engines have started to work.
        """
        stage = GenerationStage(
            self.generation,
            self.samples_of(request),
            self.spec,
            self.scaler.even_split() if again else self.scaler.runner_of(request.call.step, request.work),
            at_work=lambda: self.ledger.keep_up(self.pools.values(), 0.0),
            no_weights=self._no_weights,
            prefill=self.scaler.prefill,
            environment=None if self.environment is None else partial(self._environment_replicas, request.call),
            busy_cores=self.busy_cores,
        )
        self.generation.watch(stage)
        return stage

    async def _environment_replicas(self, call: Call) -> Sequence[Replica]:
        """Return the environment's replicas, which answer; start those that are missing. Raises ReplicaLost if one dies
        again and again."""
        pool = self.environment
        assert pool is not None
        slots = range(len(pool.allocations))
        return await gather_or_cancel(*(self._answering(pool, call, slot) for slot in slots))

    async def _answering(self, pool: ReplicaPool, call: Call, slot: int) -> Replica:
        tries = self.spec.recovery.per_step
        while True:
            replica = await pool.ready(call, slot)
            try:
                await replica.call("renew", call, timeout_s=ANSWER_S, waiting_for="the environment")
                return replica
            except ReplicaLost:
                tries -= 1
                if tries < 0:
                    raise

    def samples_of(self, request: RolloutRequest) -> StageSamples:
        """Create the samples of a stage. Raises JournalError."""
        return InFlightSamples(
            request,
            self.spec,
            len(self.generation.allocations),
            self.journal if request.work is Work.GENERATE else None,
            self.history,
            in_pieces=self.scaler.prefill is not None,
        )

    def _no_weights(self) -> str:
        """Return why actors cannot load the newest weights; empty if they can."""
        served = "://" in self.published.location
        return "the learner, which serves them, was lost" if served and not self.learner.replicas() else ""

    # -- functions that work on complete groups

    def scoring_of(self, call: Call) -> ScoreGroups:
        """Create the scoring stage of a step. It restarts released replicas."""

        async def parts(pool: ReplicaPool, groups: Sequence[Group]) -> ScoredGroups:
            return await self.serve(pool, Work.SCORE, "score", call, groups)

        async def score(groups: Sequence[Group]) -> ScoredGroups:
            pools = self.with_role(FunctionRole.SCORES)
            scored = await gather_or_cancel(*(parts(pool, groups) for pool in pools))
            return self.batches.added_up(groups, scored)

        return score

    def per_token_outputs(self, call: Call, *, learned: bool = False) -> dict[str, ComputeOutput]:
        """Create the stages that compute per-token outputs, by name of the output.

        `learned=False`: stages that run during generation. `learned=True`: stages that must run after it, because their
        functions train while the step is generated, such as a critic with an asynchronous schedule. A repeated step
        reuses its values, because the function may have learned from them since.
        """

        key = self.batches.key

        def stage(pool: ReplicaPool) -> ComputeOutput:
            kind = pool.kind
            compute = partial(self.serve, pool, Work.LOGPROBS, "compute", call)

            async def computed(groups: Sequence[Group]) -> list[list[FloatArray]]:
                known = self._outputs.setdefault((call.step, kind.output), {})
                new = {key(group): self.batches.read_by(kind, group) for group in groups if key(group) not in known}
                if read := [group for group in new.values() if group is not None]:
                    batch = self.batches.to_compute(read)
                    values = iter(self.batches.by_group(batch, await compute(batch), read))
                    known.update({name: next(values) for name, group in new.items() if group is not None})
                return [known[key(group)] if key(group) in known else zeros_of(group, kind.width) for group in groups]

            return computed

        late = self.trainers.pools if self.spec.schedule.steps_ahead else ()
        return {
            pool.kind.output: stage(pool)
            for pool in self.pools.values()
            if pool.kind.output and (pool in late) is learned
        }

    def release_idle(self, step: int) -> None:
        """Let the policy keep or release the helpers, which have finished their work in this step."""
        generates = any(each.stage is None or not each.stage.over for each in self.under_way.values())
        for pool in self.helpers:
            if not (generates and pool.kind.role is FunctionRole.ANSWERS):  # other steps need the environment
                self.scaler.idle(pool.function, step)

    # -- learner

    async def evaluate(self, call: Call, batch: Any) -> FloatArray:
        """Compute the old logprobs `[tokens]`, of the policy before the step's first update."""
        return await self.work(self._the_learner, Work.EVALUATE, "evaluate", call, batch)

    async def average(self) -> PublishedWeights | None:
        """Publish the average of the learner's weights; return None if the learner keeps no average."""
        if self.spec.learner.average_decay is None:
            return None
        return await self.publish(self.call(self.published.version.step), averaged=True)

    async def publish(self, call: Call, *, sent: asyncio.Event | None = None, **form: bool) -> PublishedWeights:
        """Write the learner's weights to the store as the version of `call`'s step; with `averaged=True`, the average.

        Concurrently with `learn` of that step, the learner runs both in order without a round trip to the driver.
        """
        return await self.work(self._the_learner, Work.PUBLISH, "publish", call, **form, sent=sent)

    # -- checkpoints

    def _notes(self, step: int) -> CheckpointNotes:
        """See BaseRun."""
        return replace(
            super()._notes(step),
            digest=self.published.version.digest,
            kl_coefficient=self.batches.kl_coefficient_after(step),
        )

    async def restore(self) -> int:
        """See BaseRun."""
        self._outputs.clear()  # they belong to the weights before the restore
        step = await super().restore()
        newest = self.checkpoints.newest()
        self.batches.restore(step, newest.notes.kl_coefficient if newest else None)
        return step

    async def publish_again(self, before: int) -> None:
        """See BaseRun."""
        version = self.published.version
        if self.learner.replicas()[0].learned_step == version.step and version.step < before:
            self.published = await self.publish(self.call(version.step))

    # -- ledger

    def record_rollouts(self, step: int, experience: Experience) -> None:
        """Record the samples of a step, and update the engines' speeds. A repeated step counts once."""
        if not self.ledger.has_rollouts_of(step):
            self.batches.record(self.ledger, step, experience)
            self.scaler.learn_speeds(step)

    def close_step(self, record: StepRecord, batch: StepBatch) -> None:
        """Record the end of a step, and emit its metrics."""
        self.scaler.end_step(record)
        self._close(record, {"response_tokens": batch.response_tokens})
        self.under_way.pop(record.step, None)
        for step, output in list(self._outputs):
            if step <= record.step:
                del self._outputs[step, output]
