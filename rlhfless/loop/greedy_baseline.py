"""The greedy response to each prompt of a step, whose reward is the baseline of the prompt's samples (ReMax, arXiv
2310.10505).

It is drawn beside the samples, as one more of the prompt: with the next index, so journal and trace hold it like them.
In the batch, and in the figures of rewards and lengths, it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfless.algorithms.batch import in_batch_order
from rlhfless.loop.rollout_request import RolloutRequest, sampling_of
from rlhfless.records import Experience, FloatArray, Group
from rlhfless.spec import RunSpec


def greedy_request(request: RolloutRequest, spec: RunSpec) -> RolloutRequest:
    """The greedy response to each prompt of `request`."""
    sampling = sampling_of(spec, greedy=True)
    return replace(request, samples_per_prompt=1, first_index=request.samples_per_prompt, sampling=sampling)


def baselines(experience: Experience, greedy: Sequence[Group]) -> FloatArray:
    """The reward of the greedy response to its prompt for each sequence of the batch that `pack` makes of the
    experience, `[sequences]`. One with a reward that failed counts with the others that it has."""
    rewards = {group.prompt.prompt_id: group.samples[0].scored.total for group in greedy}
    ordered = in_batch_order(experience.groups)
    return np.array([rewards[group.prompt.prompt_id] for group in ordered for _ in group.samples])


def baseline_figures(experience: Experience) -> dict[str, float]:
    """The mean reward of the greedy responses of a step, if there are any."""
    rewards = [group.samples[0].scored.total for group in experience.greedy]
    return {"reward_greedy": float(np.mean(rewards))} if rewards else {}
