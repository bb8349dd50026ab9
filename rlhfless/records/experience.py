"""The data from which a step learns: samples in groups, with the values that the stages of a step add to each sample.

A *sample* is one answer to a prompt, as a list of segments in the order in which the policy read or drew them: the
prompt, the model's tokens, and between two turns of the model the tokens of an environment (for example the result of a
tool). A segment of the model is the engine's own record, a Rollout: token ids, rollout logprobs, the weight version of
each span, and the reason for its end. A *group* is a prompt and its samples; the *experience* of a step is its groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from rlhfless.records.rollouts import FinishReason, FloatArray, IntArray, Prompt, Rollout, Score


class Source(StrEnum):
    """The source of tokens that the policy did not draw."""

    PROMPT = "prompt"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class GivenSegment:
    """Tokens that the policy has read and not drawn: nothing is learned from them."""

    source: Source
    token_ids: IntArray  # [segment]


Segment = GivenSegment | Rollout
"""A Rollout is the segment that the model drew."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a prompt. The first segment is the prompt, and at least one is a Rollout.

    The fields after `segments` are None until their stage has set them. Values per token belong to the tokens that
    the model drew, over all its segments: `[model tokens]`.
    """

    segments: tuple[Segment, ...]
    score: Score | None = None
    columns: Mapping[str, FloatArray] = field(default_factory=dict)
    """By name, each `[model tokens]`: reference logprobs, and columns of the user's own functions."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The segments that the model drew."""
        return tuple(segment for segment in self.segments if isinstance(segment, Rollout))

    @property
    def key(self) -> tuple[str, int]:
        """(prompt id, sample index)."""
        return self.rollouts[0].key

    @property
    def sample_index(self) -> int:
        return self.key[1]

    @property
    def tokens(self) -> int:
        """Tokens of all its segments."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def model_tokens(self) -> int:
        """Tokens that the model drew."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def text(self) -> str:
        """The text that the model drew."""
        return "".join(rollout.text for rollout in self.rollouts)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the sample's last segment of the model ended."""
        return self.rollouts[-1].finish_reason

    @property
    def scored(self) -> Score:
        """Its score. Raises ValueError before the scoring stage."""
        if self.score is None:
            raise ValueError(f"{self} has no score yet")
        return self.score

    def __str__(self) -> str:
        prompt_id, index = self.key
        return f"sample {index} of prompt {prompt_id!r}"


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its samples, in the order of their sample index."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, prompt: Prompt, rollouts: Sequence[Rollout]) -> Group:
        """A group of samples of one turn."""
        segment = GivenSegment(Source.PROMPT, np.asarray(prompt.token_ids, dtype=np.int64))
        return cls(prompt, tuple(Sample((segment, rollout)) for rollout in rollouts))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts of the group."""
        return tuple(rollout for sample in self.samples for rollout in sample.rollouts)

    def adding(self, score: Sequence[Score] | None = None, **columns: Sequence[FloatArray]) -> Group:
        """The group with scores and columns added to its samples: one value of each per sample, in their order."""
        samples = self.samples
        if score is not None:
            samples = tuple(replace(sample, score=value) for sample, value in zip(samples, score, strict=True))
        for name, values in columns.items():
            rows = zip(samples, values, strict=True)
            samples = tuple(replace(sample, columns={**sample.columns, name: value}) for sample, value in rows)
        return replace(self, samples=samples)


@dataclass(frozen=True, slots=True)
class Experience:
    """The groups of a step, by prompt id."""

    groups: tuple[Group, ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, group by group."""
        return tuple(sample for group in self.groups for sample in group.samples)

    @property
    def scores(self) -> tuple[Score, ...]:
        """The score of each sample. Raises ValueError before the scoring stage."""
        return tuple(sample.scored for sample in self.samples)

    def failed(self) -> Iterator[Sample]:
        """The samples for which a reward failed."""
        return (sample for sample in self.samples if sample.scored.failures)
