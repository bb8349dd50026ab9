"""One training step. `rollout` produces experience, `train` learns from it; a schedule decides how they overlap.

prompts -> sync weights -> generate -> score -> per-token outputs (reference, values)      rollout
        -> drop failures -> advantages -> learn -> publish weights -> ledger               train
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from rlhfless.functions.calls import Call
from rlhfless.orchestrator.batches import StepBatch
from rlhfless.orchestrator.experience import log_failures, with_redraws
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.group_pipeline import ComputeOutput, collect, with_outputs
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.orchestrator.run import RLRun, StepContext
from rlhfless.orchestrator.step_metrics import evaluation_metrics, step_metrics
from rlhfless.records import Experience, PublishedWeights, StepRecord
from rlhfless.util.clock import unix_s
from rlhfless.util.tasks import beside, gather_or_cancel

log = logging.getLogger(__name__)


async def rollout(run: RLRun, context: StepContext) -> Experience:
    """Generate the samples of a step with the newest weights, and score them.

    Raises WeightCheckFailed, RewardError, ReplicaLost, CallTimeout.
    """
    first, outputs = context.request, run.per_token_outputs(context.call)

    async def generate(request: RolloutRequest) -> Experience:
        stage = run.generate(request, again=request is not first)
        context.stage = context.stage or stage
        (experience,) = await generate_scored(run, {stage: outputs}, context.oldest)
        return experience

    experience = await generate(first)
    redraws = run.spec.algorithm.needs.redraws
    experience = await with_redraws(experience, first, run.order, redraws, generate, run.spec.scoring)
    run.release_idle(context.step)
    log.info("step %d: rollout complete: %s", context.step, run.batches.described(experience))
    return experience


async def train(run: RLRun, context: StepContext, experience: Experience) -> StepRecord:
    """Learn from the experience of a step, and publish the new weights. During critic warm-up, only the critic learns.

    Raises as `rollout` does.
    """
    step, call = context.step, context.call
    experience = await with_outputs(experience, run.per_token_outputs(call, learned=True))
    batch = await run.batches.learned_from(
        context.begun, experience, run.published.version, partial(run.evaluate, call)
    )

    metrics = await run.trainers.update_others(call, batch.packed)
    record_rollouts = partial(_record_rollouts, run, context, experience, batch)
    if run.spec.updates_policy(step):
        learning, publishing = asyncio.Event(), asyncio.Event()
        learned, run.published, rollout_figures = await gather_or_cancel(
            run.trainers.learn(run.learner, call, batch.packed, learning),
            run.publish(call, sent=publishing),
            record_rollouts(after=[learning, publishing]),
        )
        metrics |= run.batches.learned(step, batch, learned)
    else:
        rollout_figures = await record_rollouts(after=[])

    metrics = step_metrics(run, context, batch, rollout_figures, metrics | dict(batch.metrics))
    record = StepRecord(step, context.begun.start_s, unix_s(), metrics)
    run.close_step(record, batch)
    return record


async def evaluate_held_out(run: RLRun, step: int) -> Mapping[str, float]:
    """Evaluate on the held-out prompts: return `reward_mean` over all, and the metrics of each set as `<set>/<metric>`.

    All evaluations of a run use the same seeds, so they differ only in the weights.
    """
    run.clock.interrupt()
    requests = [run.held_out_request(step, greedy=greedy) for greedy in (False, True)]
    average, oldest = await run.average(), run.published.version.step
    # Both together: larger batches in the engine.
    sampled, greedy = await generate_scored(run, {run.generate(each): {} for each in requests}, oldest, apart=average)
    for experience in (sampled, greedy):
        log_failures(experience, step)
    run.evaluated_samples(step, sampled, greedy)
    return evaluation_metrics(sampled, greedy, run.spec)


async def generate_scored(
    run: RLRun,
    stages: Mapping[GenerationStage, Mapping[str, ComputeOutput]],
    oldest: int,
    apart: PublishedWeights | None = None,
) -> Sequence[Experience]:
    """Run generation stages concurrently; score groups as they complete, and add the per-token outputs of each stage.

    The stages use the newest weights, of step `oldest` or later, or the weights `apart` if given, such as the run's
    average. Each actor generates as soon as it has loaded them. If the journal has all samples, no engine is used.
    """
    synced = asyncio.Event()

    async def collected(stage: GenerationStage, outputs: Mapping[str, ComputeOutput]) -> Experience:
        await synced.wait()  # an earlier sync may have left older weights in the actors
        request = stage.request
        return await collect(stage.groups(), request.groups, run.scoring_of(request.call), outputs)

    if all(stage.has_all for stage in stages):
        synced.set()
        return await gather_or_cancel(*map(collected, stages.keys(), stages.values()))
    call = next(iter(stages)).request.call
    async with run.versions.generating(oldest, apart) as published:
        _, *experiences = await beside(
            gather_or_cancel(
                run.weights.sync(published, call, synced), *map(collected, stages.keys(), stages.values())
            ),
            _follow_versions(run, published, call) if run.spec.schedule.in_flight and apart is None else None,
        )
    return experiences


async def _follow_versions(run: RLRun, published: PublishedWeights, call: Call) -> None:
    """Load each version that is published after `published` during generation."""
    while True:
        published = await run.versions.newer_than(published.version)
        await run.weights.sync(published, call)


async def _record_rollouts(
    run: RLRun, context: StepContext, experience: Experience, batch: StepBatch, *, after: Sequence[asyncio.Event]
) -> dict[str, float]:
    """Record the rollouts in the ledger, and return their metrics.

    Waits for `after`, set once the learner has its calls, so that this work overlaps with the learner's.
    """
    for sent in after:
        await sent.wait()
    run.record_rollouts(context.step, experience)
    return batch.rollout_metrics(context.request.groups)
