"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): other prompts in place of those that teach nothing.

Where all samples of a prompt have the same reward, every advantage is 0. If the algorithm asks for it
(`needs.redraws`), a step draws other prompts, at most that many times, and learns from the groups with a signal alone.
A sample whose reward failed is no signal: a group has one if the rewards of the samples that are learned from differ.
Each time it draws as many as give what it lacks if as large a share of them has a signal as of those before: the last
few prompts one by one would leave the engines idle. Which prompts they are follows from the seed, the step and what was
drawn before, so a step that is done again draws the same ones, from the journal as far as they are there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rlhfless.orchestrator.failures import too_many_failed, usable_of
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Experience, Group
from rlhfless.spec import ScoringSpec

log = logging.getLogger(__name__)


ROUNDING = 1e-12
"""Rewards that differ by less, relative to the largest, are equal: sums of parts in another order."""


def differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a prompt's samples differ; False for fewer than two."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return high - low > ROUNDING * max(abs(low), abs(high))


def has_signal(group: Group) -> bool:
    """Whether the samples of a group differ in their rewards. Leave out those that failed first (`usable_of`)."""
    return differ([sample.scored.total for sample in group.samples])


def with_signal(experience: Experience) -> Experience:
    """The groups with a signal; all of them if none has one, because a step needs a batch."""
    groups = tuple(filter(has_signal, experience.groups))
    return Experience(groups) if groups else experience


async def redrawn(
    experience: Experience,
    request: RolloutRequest,
    order: PromptOrder,
    redraws: int,
    draw: Callable[[RolloutRequest], Awaitable[Experience]],
    scoring: ScoringSpec,
) -> Experience:
    """What a step has drawn for `request`, and what `draw` gives in place of groups without signal, by prompt id. It
    stops at a step that has so many failures that it ends the run."""
    groups = {group.prompt.prompt_id: group for group in experience.groups}
    wanted = len(request.prompts)

    def signals() -> int:
        return sum(map(has_signal, usable_of(Experience(tuple(groups.values())), scoring).groups))

    def lacking() -> int:
        return max(wanted - signals(), 0)

    for _ in range(redraws):
        if too_many_failed(Experience(tuple(groups.values())), scoring):
            break
        count = min(math.ceil(lacking() / (max(signals(), 1) / len(groups))), wanted)
        prompts = order.others(request.call.step - 1, count, groups.keys())
        if not prompts:
            break
        further = await draw(replace(request, prompts=tuple(prompts)))
        groups |= {group.prompt.prompt_id: group for group in further.groups}
    if redraws and lacking():
        what = "step %d learns from %d of %d prompts: %d redraws gave no more with a signal"
        log.warning(what, request.call.step, wanted - lacking(), wanted, redraws)
    return Experience(tuple(groups[prompt_id] for prompt_id in sorted(groups)))
