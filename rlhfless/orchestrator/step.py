"""One training step: plan, sync, generate, score, reference, evaluate, advantages, learn, publish, ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from rlhfless.algorithms.base import ActorCritic
from rlhfless.algorithms.batch import PackedBatch, in_batch_order, leave_out, pack
from rlhfless.functions.base import Call
from rlhfless.orchestrator.failures import without_failures
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.redraws import redrawn, with_signal
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.orchestrator.run import Run
from rlhfless.orchestrator.stages import ComputeColumn, collect, with_columns
from rlhfless.orchestrator.staleness import by_token, split, staleness_of
from rlhfless.orchestrator.step_context import StepContext
from rlhfless.orchestrator.summary import drawn_metrics, step_metrics
from rlhfless.records import Experience, FinishReason, PublishedWeights, StepRecord
from rlhfless.spec import Needs
from rlhfless.util.tasks import beside, gather_or_cancel


async def rollout(run: Run, context: StepContext) -> Experience:
    """Generate the samples of a step with the newest published weights, and score them. Raises what a stage raised:
    WeightCheckFailed, RewardError, ReplicaLost, CallTimeout."""
    request = context.request
    columns = run.columns_of(context.call)

    def generation(wanted: RolloutRequest) -> GenerationStage:
        stage = run.generate(wanted, again=wanted is not request)
        context.stage = context.stage or stage
        return stage

    async def draw(wanted: RolloutRequest) -> Experience:
        (experience,) = await drawn(run, {generation(wanted): columns}, context.oldest)
        return experience

    redraws = run.spec.algorithm.needs.redraws
    experience = await redrawn(await draw(request), request, run.order, redraws, draw, run.spec.scoring)
    run.release_idle(context.step)
    return experience


async def drawn(
    run: Run,
    stages: Mapping[GenerationStage, Mapping[str, ComputeColumn]],
    oldest: int,
    apart: PublishedWeights | None = None,
) -> Sequence[Experience]:
    """The samples of each stage, scored and with its columns; all are drawn at once, with the newest weights, which are
    at least of the step `oldest`; or with weights `apart` from those of the run, such as their average.

    Generation may begin during the sync: each actor draws as soon as it has loaded the weights. Samples that are all in
    the journal need no engine.
    """

    asked = asyncio.Event()

    async def collected(stage: GenerationStage, columns: Mapping[str, ComputeColumn]) -> Experience:
        request = stage.request
        await asked.wait()  # the sync before this one may have left the actors with older weights
        return await collect(stage.groups(), request.groups, run.scoring_of(request.call), columns)

    if not any(stage.recall() for stage in stages):
        asked.set()
        return await gather_or_cancel(*map(collected, stages.keys(), stages.values()))
    call = next(iter(stages)).request.call
    async with run.versions.drawing(oldest, apart) as published:
        _, *experiences = await beside(
            gather_or_cancel(run.weights.sync(published, call, asked), *map(collected, stages.keys(), stages.values())),
            _followed(run, published, call) if run.spec.schedule.in_flight and apart is None else None,
        )
    return experiences


async def _followed(run: Run, published: PublishedWeights, call: Call) -> None:
    """Load each version that is published after `published`, while samples are drawn."""
    while True:
        published = await run.versions.newer_than(published.version)
        await run.weights.sync(published, call)


async def train(run: Run, context: StepContext, experience: Experience) -> StepRecord:
    """Learn from the samples of a step, and publish the weights that result; while a critic warms up, it alone learns.
    Raises as `rollout` does."""
    step, call = context.step, context.call
    staleness = staleness_of(experience, run.published.version)
    experience = await with_columns(experience, run.columns_of(call, learned=True))
    kept = without_failures(experience, run.spec.scoring, step)
    needs = run.spec.algorithm.needs
    learned_from = with_signal(kept) if needs.with_signal else kept
    whole = await _whole_batch(run, context, learned_from)
    if staleness and staleness.differs:
        behind = by_token(learned_from.groups, run.published.version)
        whole = replace(whole.with_columns(staleness=behind), oldest=max(staleness.most, 0))
    batch = learned_batch(whole, learned_from, needs)
    figures = await run.keepers.update_others(call, batch)
    if run.spec.updates_policy(step):
        learning, publishing = asyncio.Event(), asyncio.Event()
        learned, run.published, drawn = await gather_or_cancel(
            run.keepers.learn(run.learner, call, batch, learning),
            run.publish(call, sent=publishing),
            taken(run, context, experience, kept, after=[learning, publishing]),
        )
        figures |= {**split(learned), **run.algorithms.learn(step, whole)}
    else:
        drawn = await taken(run, context, experience, kept, after=[])
    figures |= staleness.metrics if staleness else {}
    metrics = step_metrics(run, context, experience, learned_from, drawn, figures)
    record = StepRecord(step, context.begun.start_s, time.time(), metrics)
    run.close_step(record, experience)
    run.check_rollouts(record, staleness)
    return record


async def _whole_batch(run: Run, context: StepContext, learned_from: Experience) -> PackedBatch:
    """The batch of a step whose samples are all there."""
    needs = run.spec.algorithm.needs
    batch = pack(learned_from.groups)
    if needs.old_logprobs:
        # Otherwise the learner alone needs them, and computes those that its first update makes old.
        batch = batch.with_columns(old_logprobs=await run.evaluate(context.call, batch))
    return _with_targets(run, context.step, batch)


def learned_batch(batch: PackedBatch, experience: Experience, needs: Needs) -> PackedBatch:
    """What the learner gets of the packed samples of a step. Responses that are left out have been in the statistics of
    their group, with the KL of all of their tokens in the reward."""
    if not needs.whole_responses:
        return batch
    samples = [sample for group in in_batch_order(experience.groups) for sample in group.samples]
    return leave_out(batch, np.array([sample.finish_reason == FinishReason.LENGTH for sample in samples]))


def _with_targets(run: Run, step: int, batch: PackedBatch) -> PackedBatch:
    """The batch with what policy and critic learn from."""
    algorithm = run.algorithms.at(step)
    targets = {"advantages": algorithm.advantages(batch)}
    if run.spec.algorithm.needs.values:
        targets["returns"] = cast(ActorCritic, algorithm).returns(batch)
    return batch.with_columns(**targets)


async def taken(
    run: Run, context: StepContext, experience: Experience, kept: Experience, after: Sequence[asyncio.Event]
) -> dict[str, float]:
    """Put the rollouts into the ledger; returns their figures. It waits for `after`, when the calls to the learner have
    left the driver, so that this work is done while the learner is busy."""
    for sent in after:
        await sent.wait()
    run.take(context.step, experience)
    return drawn_metrics(experience, kept, context.request.groups)
