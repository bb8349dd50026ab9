"""One training step: plan, sync, generate, score, reference, evaluate, advantages, learn, publish, ledger."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from rlhfless.algorithms.base import ActorCritic
from rlhfless.algorithms.batch import PackedBatch, in_batch_order, leave_out, pack
from rlhfless.functions.base import Call
from rlhfless.orchestrator.experience import (
    by_token,
    log_failures,
    split,
    staleness_of,
    usable,
    with_redraws,
    with_signal,
    without_failures,
)
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.group_pipeline import ComputeColumn, collect, with_columns
from rlhfless.orchestrator.in_flight_samples import RolloutRequest
from rlhfless.orchestrator.run import RLRun, StepContext
from rlhfless.orchestrator.summary import drawn_metrics, mean_parts, step_metrics
from rlhfless.records import Experience, FinishReason, Group, PublishedWeights, StepRecord
from rlhfless.spec import EvaluationSpec, Needs, ScoringSpec
from rlhfless.util.tasks import beside, gather_or_cancel


async def rollout(run: RLRun, context: StepContext) -> Experience:
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
    experience = await with_redraws(await draw(request), request, run.order, redraws, draw, run.spec.scoring)
    run.release_idle(context.step)
    return experience


async def drawn(
    run: RLRun,
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

    if not any(stage.load_from_journal() for stage in stages):
        asked.set()
        return await gather_or_cancel(*map(collected, stages.keys(), stages.values()))
    call = next(iter(stages)).request.call
    async with run.versions.generating(oldest, apart) as published:
        _, *experiences = await beside(
            gather_or_cancel(run.weights.sync(published, call, asked), *map(collected, stages.keys(), stages.values())),
            _followed(run, published, call) if run.spec.schedule.in_flight and apart is None else None,
        )
    return experiences


async def _followed(run: RLRun, published: PublishedWeights, call: Call) -> None:
    """Load each version that is published after `published`, while samples are drawn."""
    while True:
        published = await run.versions.newer_than(published.version)
        await run.weights.sync(published, call)


async def train(run: RLRun, context: StepContext, experience: Experience) -> StepRecord:
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
    figures = await run.trainers.update_others(call, batch)
    if run.spec.updates_policy(step):
        learning, publishing = asyncio.Event(), asyncio.Event()
        learned, run.published, drawn = await gather_or_cancel(
            run.trainers.learn(run.learner, call, batch, learning),
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


async def _whole_batch(run: RLRun, context: StepContext, learned_from: Experience) -> PackedBatch:
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


def _with_targets(run: RLRun, step: int, batch: PackedBatch) -> PackedBatch:
    """The batch with what policy and critic learn from."""
    algorithm = run.algorithms.at(step)
    targets = {"advantages": algorithm.advantages(batch)}
    if run.spec.algorithm.needs.values:
        targets["returns"] = cast(ActorCritic, algorithm).returns(batch)
    return batch.with_columns(**targets)


async def taken(
    run: RLRun, context: StepContext, experience: Experience, kept: Experience, after: Sequence[asyncio.Event]
) -> dict[str, float]:
    """Put the rollouts into the ledger; returns their figures. It waits for `after`, when the calls to the learner have
    left the driver, so that this work is done while the learner is busy."""
    for sent in after:
        await sent.wait()
    run.record_rollouts(context.step, experience)
    return drawn_metrics(experience, kept, context.request.groups)


async def evaluate_held_out(run: RLRun, step: int) -> Mapping[str, float]:
    """The figures of the held-out prompts, of which there is at least one: `reward_mean` over all of them, and of each
    set, with its name `<set>/` before them, those of `figures_of`.

    All evaluations of a run draw with the same seeds, so two of them differ by the weights alone.
    """
    run.clock.interrupt()
    requests = [run.held_out_request(step, greedy=greedy) for greedy in (False, True)]
    # Both at once: more sequences per iteration of the engine.
    apart, oldest = await run.average(), run.published.version.step
    sampled, greedy = await drawn(run, {run.generate(request): {} for request in requests}, oldest, apart=apart)
    for experience in (sampled, greedy):
        log_failures(experience, step)
    run.evaluated_samples(step, sampled, greedy)
    sets = dict.fromkeys(group.prompt.source for group in sampled.groups)
    return mean_reward(sampled, run.spec.scoring) | {
        f"{name}/{figure}" if name else figure: value
        for name in sets
        for figure, value in figures_of(_of(sampled, name), _of(greedy, name), run.spec.evaluation).items()
    }


def mean_reward(sampled: Experience, scoring: ScoringSpec) -> dict[str, float]:
    """`reward_mean`: the mean weighted reward over the samples of all sets. One whose reward failed counts if samples
    like it are learned from (`scoring.on_failure`)."""
    scores = [sample.scored for sample in sampled.samples]
    totals = [score.total for score in scores if usable(score.failures, scoring)]
    return {"reward_mean": math.fsum(totals) / len(totals)} if totals else {}


def figures_of(sampled: Experience, greedy: Experience, spec: EvaluationSpec) -> dict[str, float]:
    """Of every reward part: `<part>`, its mean over the samples, which is mean@k for any k; `<part>_greedy`, its mean
    over the greedy responses; and `<part>_pass@<k>` for each k that the spec asks for."""
    greedy_means = {f"{part}_greedy": value for part, value in mean_parts(greedy.scores).items()}
    passed: dict[str, float] = {}
    for part in mean_parts(sampled.scores):
        counts = [_counts(group, part, spec.pass_from) for group in sampled.groups]
        for k in spec.pass_at:
            # A prompt with fewer than k samples whose reward did not fail is left out.
            if enough := [(n, c) for n, c in counts if n >= k]:
                passed[f"{part}_pass@{k}"] = pass_at(k, enough)
    return mean_parts(sampled.scores) | passed | greedy_means


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> float:
    """The chance that at least one of k samples of a prompt passes, mean over prompts of which (n samples, c that
    passed) are known, n >= k: 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al., arXiv 2107.03374, eq. 1)."""
    return math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)


def _counts(group: Group, part: str, pass_from: float) -> tuple[int, int]:
    """Samples of a prompt that have a reward part, and those of them with a high enough one. A failed part is missing:
    it says nothing about the response."""
    values = [sample.scored.parts[part] for sample in group.samples if part in sample.scored.parts]
    return len(values), sum(value >= pass_from for value in values)


def _of(experience: Experience, source: str) -> Experience:
    """The groups whose prompts are of a set."""
    return Experience(tuple(group for group in experience.groups if group.prompt.source == source))
