"""The request to a generation stage: prompts, samples, seeds and sampling settings."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.functions.base import Call
from rlhfless.functions.generation.messages import SampleItem, Sampling
from rlhfless.records import Prompt, Work, sample_seed
from rlhfless.spec import RunSpec


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
    first_index: int = 0
    """Index of each prompt's first sample."""

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """The samples of one prompt. Their seeds do not depend on where they are drawn."""
        return tuple(
            SampleItem(
                prompt.prompt_id,
                index,
                prompt.token_ids,
                sample_seed(self.seed, self.seed_step, prompt.prompt_id, index),
            )
            for index in range(self.first_index, self.first_index + self.samples_per_prompt)
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
