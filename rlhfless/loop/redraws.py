"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): other prompts in place of those that teach nothing.

Where all samples of a prompt have the same reward, every advantage is 0. If the algorithm asks for it
(`needs.redraws`), a step draws other prompts, at most that many times, and learns from the groups with a signal alone.
Each time it draws as many as give what it lacks if as large a share of them has a signal as of those before: the last
few prompts one by one would leave the engines idle. Which prompts they are follows from the seed, the step and what was
drawn before, so a step that is done again draws the same ones, from the journal as far as they are there.
"""

from __future__ import annotations

import logging
import math
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
    wanted = len(request.prompts)

    def lacking() -> int:
        return max(wanted - sum(map(has_signal, groups.values())), 0)

    for _ in range(redraws):
        share = max(sum(map(has_signal, groups.values())), 1) / len(groups)
        count = min(math.ceil(lacking() / share), wanted)
        prompts = order.others(request.call.step - 1, count, groups.keys())
        if not prompts:
            break
        further = await draw(replace(request, prompts=tuple(prompts)))
        groups |= {group.prompt.prompt_id: group for group in further.groups}
    if redraws and lacking():
        what = "step %d learns from %d of %d prompts: %d redraws gave no more with a signal"
        log.warning(what, request.call.step, wanted - lacking(), wanted, redraws)
    return Experience(tuple(groups[prompt_id] for prompt_id in sorted(groups)))
