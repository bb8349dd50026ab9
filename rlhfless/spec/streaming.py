"""Whether the learner may begin with complete groups (`schedule.streaming`), or what it waits for.

Learning moves into the time in which others are drawn, so it needs devices of its own; and what is learned from a group
must follow from that group alone, up to a factor that is known at the end.
"""

from __future__ import annotations

from rlhfless.spec.run import RunSpec

PARTS = 8
"""Parts of a step, in which groups go to the learner. With more of them less is left to learn at the end; with fewer,
micro-batches are fuller."""


def waits_for(spec: RunSpec) -> str:
    """Why the learner waits for all samples of a step; empty if it begins with complete groups."""
    needs, name = spec.algorithm.needs, spec.algorithm.type
    if spec.placement.in_turns:
        return "functions take turns on their devices (placement.turns, placement.tenants)"
    if spec.placement.mode != "disaggregated":
        return "generation and learning share the devices (placement.mode), so nothing would be done beside generation"
    if spec.updates_per_step > 1:
        return f"a step has {spec.updates_per_step} updates (mini_batches, epochs), whose groups are of the whole batch"
    if needs.old_logprobs:
        return f"advantages of {name} need the learner's logprobs before the update, such as for a KL in the reward"
    if needs.by_group is None:
        return f"{name} computes advantages or its loss from the whole batch (`by_group` of its needs)"
    return ""
