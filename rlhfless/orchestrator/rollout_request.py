"""The request to a generation stage: prompts, samples, seeds and sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless.functions.base import Call
from rlhfless.functions.generation.messages import SampleItem, Sampling
from rlhfless.records import Prompt, Work, sample_seed
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the groups that a step draws it learns from, if it does not wait for all."""

    groups: int
    """So many: those that are complete first."""
    awaited: frozenset[str]
    """Prompts that are among them in any case."""
    begun: Mapping[str, int]
    """By prompt, the step that began it, which is part of its samples' seeds."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The samples that one generation stage is to draw."""

    call: Call
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: Sampling
    work: Work
    seed: int
    seed_step: int
    """Part of every seed: the step, or one number for all evaluations, which then differ by the weights alone."""
    selection: Selection | None = None
    """If its step does not wait for all groups."""

    @property
    def groups(self) -> int:
        """Groups that come of it."""
        return self.selection.groups if self.selection else len(self.prompts)

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """The samples of one prompt. Their seeds do not depend on where they are drawn."""
        begun = self.selection.begun[prompt.prompt_id] if self.selection else self.seed_step
        return tuple(
            SampleItem(
                prompt.prompt_id,
                index,
                prompt.token_ids,
                sample_seed(self.seed, begun, prompt.prompt_id, index),
            )
            for index in range(self.samples_per_prompt)
        )


def sampling_of(spec: RunSpec, *, greedy: bool = False) -> Sampling:
    """The spec's sampling settings, or their greedy variant."""
    generation = spec.generation
    return Sampling(
        max_tokens=generation.max_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=0 if greedy else generation.top_k,
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
    )
