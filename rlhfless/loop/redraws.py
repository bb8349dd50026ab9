"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): other prompts in place of those that teach nothing.

Where all samples of a prompt have the same reward, every advantage is 0. If the algorithm asks for it
(`needs.redraws`), a step draws as many other prompts as it lacks, at most that many times, and learns from the groups
with a signal alone. Which prompts they are follows from the seed, the step and what was drawn before, so a step that is
done again draws the same ones, from the journal as far as they are there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlhfless.loop.rollout_request import RolloutRequest
from rlhfless.prepare.prompts import PromptOrder
from rlhfless.records import Experience, Group

log = logging.getLogger(__name__)


def has_signal(group: Group) -> bool:
    """Whether the samples of a group differ in their rewards."""
    return len({sample.scored.total for sample in group.samples}) > 1


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
) -> Experience:
    """What a step has drawn for `request`, and what `draw` gives in place of groups without signal, by prompt id."""
    groups = {group.prompt.prompt_id: group for group in experience.groups}
    for _ in range(redraws):
        lacking = len(request.prompts) - sum(map(has_signal, groups.values()))
        prompts = order.others(request.call.step - 1, lacking, groups.keys())
        if not prompts:
            break
        further = await draw(replace(request, prompts=tuple(prompts)))
        groups |= {group.prompt.prompt_id: group for group in further.groups}
    lacking = len(request.prompts) - sum(map(has_signal, groups.values()))
    if lacking > 0 and redraws:
        log.warning(
            "step %d learns from %d prompts fewer: %d redraws gave no more with a signal",
            request.call.step,
            lacking,
            redraws,
        )
    return Experience(tuple(groups[prompt_id] for prompt_id in sorted(groups)))
