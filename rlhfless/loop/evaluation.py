"""Evaluation on held-out prompts: sampled at the training temperature, and greedy."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless.fleet.tasks import gather_or_cancel
from rlhfless.loop.failures import log_failures
from rlhfless.loop.rollout_request import RolloutRequest
from rlhfless.loop.run import Run
from rlhfless.loop.stages import collect
from rlhfless.loop.summary import mean_parts


async def evaluate_held_out(run: Run, step: int) -> Mapping[str, float]:
    """Mean of every reward part on the held-out prompts, of which there is at least one: `<part>` sampled and
    `<part>_greedy`.

    All evaluations of a run draw with the same seeds, so two of them differ by the weights alone.
    """
    run.clock.interrupted()
    await run.sync(run.published, run.call(step))
    # Both at once: more sequences per iteration of the engine.
    sampled, greedy = await gather_or_cancel(
        _means(run, run.held_out_request(step, greedy=False)), _means(run, run.held_out_request(step, greedy=True))
    )
    return {**sampled, **{f"{part}_greedy": value for part, value in greedy.items()}}


async def _means(run: Run, request: RolloutRequest) -> dict[str, float]:
    groups = run.generate(request).groups()
    experience = await collect(groups, len(request.prompts), run.scoring_of(request.call), {})
    log_failures(experience, request.call.step)
    return mean_parts(experience.scores)
