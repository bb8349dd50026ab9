"""A reward that says nothing: exact match, shuffled among the samples of each prompt.

The rewards of a group keep their mean and spread, so the size of the updates stays what it was; only what they mean
is lost.
"""

from __future__ import annotations

import random
from collections import defaultdict


def shuffled(prompt_id: list[str], response: list[str], answer: list[str]) -> list[float]:
    """One reward per sample; called with all samples of one or more groups."""
    rewards = [float(given == expected) for given, expected in zip(response, answer, strict=True)]
    members: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(prompt_id):
        members[name].append(index)
    for name, indices in members.items():
        # Seeded by what was drawn: another shuffle at every visit of a prompt, the same one if the run is repeated.
        chosen = random.Random(name + "|".join(response[i] for i in indices)).sample(indices, len(indices))
        values = [rewards[i] for i in chosen]
        for index, value in zip(indices, values, strict=True):
            rewards[index] = value
    return rewards
