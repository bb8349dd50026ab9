"""A few samples of a step, for people to read. Pure."""

from __future__ import annotations

from typing import Any

from rlhfless.records import Experience, Sample
from rlhfless.text import storable

GROUPS = 4
"""Prompts of a step that are kept, evenly over the step; of each the samples of lowest and highest reward."""

MOST_CHARACTERS = 20_000
"""The most characters of a prompt or a response; the trace has the whole, if `logging.record_tokens` is set."""


def samples_to_read(experience: Experience, step: int) -> list[dict[str, Any]]:
    """The samples, another choice of prompts in each step."""
    groups = experience.groups
    stride = max(len(groups) // GROUPS, 1)
    chosen = [groups[(place + step) % len(groups)] for place in range(0, len(groups), stride)][:GROUPS]
    folders = []
    for group in chosen:
        ordered = sorted(group.samples, key=lambda sample: (sample.scored.total, sample.sample_index))
        for sample in dict.fromkeys((ordered[-1].sample_index, ordered[0].sample_index)):
            folders.append(_told(group.prompt.text, next(s for s in group.samples if s.sample_index == sample)))
    return folders


def _told(prompt: str, sample: Sample) -> dict[str, Any]:
    rollout = sample.rollouts[-1]
    score = sample.scored
    return {
        "prompt_id": sample.key[0],
        "sample_index": sample.sample_index,
        "prompt": _cut(prompt),
        "response": _cut("".join(rollout.text for rollout in sample.rollouts)),
        "finish_reason": str(sample.finish_reason),
        "response_tokens": sample.model_tokens,
        "weights": rollout.version_spans[-1].version if rollout.version_spans else "",
        "rewards": {name: float(value) for name, value in score.parts.items()},
        "reward": float(score.total),
        "failures": {name: _cut(why) for name, why in score.failures.items()},
    }


def _cut(text: str) -> str:
    text = storable(text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"
