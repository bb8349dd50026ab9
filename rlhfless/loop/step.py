"""One training step: plan, sync, generate, score, reference, evaluate, advantages, learn, publish, ledger."""

from __future__ import annotations

import time

import numpy as np

from rlhfless.algorithms.advantages import with_grpo_advantages
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.fleet.tasks import together
from rlhfless.loop.draw import Draw
from rlhfless.loop.experience import Experience, collect
from rlhfless.loop.failures import without_failures
from rlhfless.loop.run import Run
from rlhfless.loop.summary import step_metrics
from rlhfless.records import StepRecord


async def train_step(run: Run, step: int) -> StepRecord:
    """Train on one batch of prompts; steps count from 1. Weights of step - 1 draw, weights of `step` result.

    Raises what a stage raised: WeightCheckFailed, RewardError, ReplicaLost, CallTimeout.
    """
    begun, call = run.begins(step), run.call(step)
    draw, drawn_with = run.plan(step), run.published.version
    _, experience = await together(run.sync(call), drawn_and_scored(run, draw))
    run.release_idle(step)
    kept = without_failures(experience, run.spec.scoring, step)
    batch = assemble(kept)
    if run.spec.algorithm.kl.in_reward and run.spec.mini_batches > 1:
        # Elsewhere only the learner needs old logprobs, and computes those that its first update makes old.
        batch = batch.with_old_logprobs(await run.evaluate(call, batch))
    batch = with_grpo_advantages(batch, rewards_of(kept), run.spec.algorithm)
    learned, run.published, drawn = await together(
        run.learn(call, batch), run.publish(call), run.take(step, experience, kept)
    )
    metrics = step_metrics(run, experience, drawn, learned, begun)
    record = StepRecord(step, begun.start_s, time.time(), metrics)
    run.close_step(record, experience)
    run.check_rollouts(record, drawn_with)
    return record


async def drawn_and_scored(run: Run, draw: Draw) -> Experience:
    """Generation, with scoring and reference behind it. It may begin during the sync: each actor draws as soon as it
    has loaded the weights."""
    call = draw.call
    return await collect(run.generate(draw), len(draw.prompts), run.scoring_of(call), run.reference_of(call))


def assemble(experience: Experience) -> PackedBatch:
    """The learner's batch, sorted by (prompt, sample), with the reference logprobs if there are any."""
    batch = pack(experience.groups)
    if experience.reference_logprobs is None:
        return batch
    values = np.zeros(len(batch.tokens), dtype=np.float32)
    values[batch.response_mask] = np.concatenate(
        [logprobs for group in experience.reference_logprobs for logprobs in group]
    )
    return batch.with_reference_logprobs(values)


def rewards_of(experience: Experience) -> np.ndarray:
    """`[sequences]`, in the order of the batch."""
    return np.array([score.total for group in experience.scores for score in group])
