"""Prompts, rollouts, scores, and the samples, groups and examples from which a step learns.

A *sample* is one answer to a prompt, as a list of segments: the prompt, the model's tokens (a Rollout, as recorded by
the engine), and between model turns the tokens of an environment. A *group* is a prompt and its samples. The
*experience* of a step is its groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.records.episodes import Episode, EpisodeStatus

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The response reached max_tokens."""
    ABORT = "abort"
    """Its actor was stopped; another actor continues from the tokens so far."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the data set, as the policy sees it."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards."""
    source: str = ""
    """The name of its data set, if any."""
    read_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    """Token ids that a function reads instead of `token_ids`, by function: the prompts of some teachers."""
    where: str = field(default="", compare=False, kw_only=True)
    """The row in its file, for messages: `train.jsonl:12`."""

    @property
    def place(self) -> str:
        """The prompt's name in messages: the row in its file, or its id."""
        return self.where or f"the prompt {self.prompt_id!r}"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were generated with this weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RouteSpan:
    """Response tokens [start, end) have their routes (which experts computed them) in a file, from `row` on."""

    file: str
    """Relative to the run's folder of routes (rlhfless.records.routes)."""
    start: int
    end: int
    row: int = 0

    def within(self, start: int, end: int, moved: int = 0) -> RouteSpan | None:
        """Return the part in [start, end), moved by `moved` tokens; None if there is none."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        return RouteSpan(self.file, first + moved, last + moved, self.row + first - self.start)


def routes_within(spans: Iterable[RouteSpan], start: int, end: int, moved: int = 0) -> tuple[RouteSpan, ...]:
    """Return the parts of spans in [start, end); see RouteSpan.within."""
    parts = (span.within(start, end, moved) for span in spans)
    return tuple(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The response of one sample, in one turn or several: the reply to a request, and a row of the journal.

    `logprobs` are *rollout* logprobs: of the sampled tokens at the sampling temperature, and 0 for tokens of an
    environment.
    """

    prompt_id: str
    sample_index: int
    seed: int
    token_ids: IntArray  # [response]
    logprobs: FloatArray  # [response]
    text: str
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    actor: str
    started_s: float
    finished_s: float
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    episode: Episode | None = None
    """Which tokens an environment wrote, and how; None in a run without one."""
    routes: tuple[RouteSpan, ...] = ()
    """Where the routes of tokens are, of a mixture of experts whose routes are replayed."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.prompt_id, self.sample_index)

    def part(self, start: int, end: int, **changes: Any) -> Rollout:
        """Return the response tokens [start, end) as a rollout of one turn."""
        spans = (VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start)
                 for s in self.version_spans if s.start < end and s.end > start)  # fmt: skip
        tokens, logprobs = self.token_ids[start:end], self.logprobs[start:end]
        routes = routes_within(self.routes, start, end, -start)
        return replace(
            self,
            token_ids=tokens,
            logprobs=logprobs,
            version_spans=tuple(spans),
            episode=None,
            routes=routes,
            **changes,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one rollout, and its parts."""

    total: float
    parts: Mapping[str, float]
    """Unweighted value of each part. A failed part is missing, or 0 if the spec says so."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The cause of each failed part."""

    def plus(self, other: Score) -> Score:
        """Return the sum with the score of other parts of the same rollout."""
        return Score(self.total + other.total, {**self.parts, **other.parts}, {**self.failures, **other.failures})


def sample_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Derive the seed of one sample, independent of actor and order.

    63 bits of BLAKE2b: engines take signed 64-bit seeds, and Python's `hash` differs between processes.
    """
    text = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


# -- samples and groups


class Source(StrEnum):
    """The source of tokens that the policy did not generate."""

    PROMPT = "prompt"
    """The beginning of a conversation."""
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class GivenSegment:
    """Tokens that the policy has read but not generated. They are excluded from learning."""

    source: Source
    token_ids: IntArray  # [segment]


Segment = GivenSegment | Rollout
"""A Rollout is a segment that the model generated."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a prompt. The first segment is the prompt, and at least one segment is a Rollout.

    Each segment from the source PROMPT begins a conversation, of which the model reads nothing else: an agent program
    may have several, as those of its sub-agents. They are one answer with one reward.

    Fields after `segments` are empty until their stage sets them. Per-token values cover the generated tokens of all
    segments: `[model tokens]`.
    """

    segments: tuple[Segment, ...]
    score: Score | None = None
    outputs: Mapping[str, FloatArray] = field(default_factory=dict)
    """Per-token outputs by name, each `[model tokens]`: reference logprobs, and outputs of user functions."""
    whole: Rollout | None = None
    """The response of which the generated segments are parts; None in a run without an environment."""

    @classmethod
    def of(cls, prompt: GivenSegment, rollout: Rollout) -> Sample:
        """Return a rollout as a sample, an episode with the score that its environment gave.

        An episode that failed has a failed score.
        """
        episode = rollout.episode
        if episode is None:
            return cls((prompt, rollout))
        opening = GivenSegment(Source.PROMPT, np.asarray(episode.opening, np.int64)) if episode.opening else prompt
        by_conversation: dict[int, list[Segment]] = {0: [opening]}
        at = 0
        for number, turn in enumerate(episode.turns, 1):
            segments = by_conversation.setdefault(turn.conversation, [])
            if turn.start > at:
                source = Source.ENVIRONMENT if segments else Source.PROMPT
                segments.append(GivenSegment(source, rollout.token_ids[at : turn.start]))
            is_last = number == len(episode.turns)
            segments.append(
                rollout.part(
                    turn.start,
                    turn.end,
                    text=turn.text,
                    finish_reason=rollout.finish_reason if is_last else FinishReason(turn.finish_reason),
                    started_s=turn.started_s,
                    finished_s=turn.ended_s,
                    cached_tokens=turn.cached_tokens,
                )
            )
            at = turn.end
        if not episode.turns:  # it failed before the first turn
            by_conversation[0].append(rollout.part(0, 0))
        segments = [segment for each in by_conversation.values() for segment in each]
        return cls(tuple(segments), _score_of(episode), whole=rollout)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, Rollout))

    @property
    def rollout(self) -> Rollout:
        """The whole response."""
        return self.rollouts[0] if self.whole is None else self.whole

    @property
    def episode(self) -> Episode | None:
        """How the response came about; None in a run without an environment."""
        return self.rollout.episode

    @property
    def earned(self) -> FloatArray | None:
        """What the turns before that of each generated token have earned, `[model tokens]`; None without an
        environment."""
        if self.episode is None:
            return None
        before = self.episode.earned_before()
        turns = ((self.episode.turns[number], before[number]) for number in self.episode.by_conversation)
        values = [np.full(turn.end - turn.start, earned, np.float32) for turn, earned in turns]
        return np.concatenate(values) if values else np.zeros(0, np.float32)

    @property
    def key(self) -> tuple[str, int]:
        """(prompt id, sample index)."""
        return self.rollouts[0].key

    @property
    def sample_index(self) -> int:
        return self.key[1]

    @property
    def routes(self) -> tuple[RouteSpan, ...]:
        """Where the routes of the generated tokens are, by their number `[model tokens]`."""
        at, spans = 0, list[RouteSpan]()
        for rollout in self.rollouts:
            spans += routes_within(rollout.routes, 0, len(rollout.token_ids), at)
            at += len(rollout.token_ids)
        return tuple(spans)

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def model_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(rollout.text for rollout in self.rollouts)

    @property
    def finish_reason(self) -> FinishReason:
        return self.rollouts[-1].finish_reason if self.whole is None else self.whole.finish_reason

    @property
    def scored(self) -> Score:
        """The score. Raises ValueError before the scoring stage."""
        if self.score is None:
            raise ValueError(f"{self} has no score yet")
        return self.score

    def __str__(self) -> str:
        prompt_id, index = self.key
        return f"sample {index} of prompt {prompt_id!r}"


ENVIRONMENT = "environment"
"""Name of the part of a score that the environment gives."""


def _score_of(episode: Episode) -> Score | None:
    """Return the score that an environment gives; None if it leaves that to rewards."""
    if episode.status is EpisodeStatus.FAILED:
        return Score(0.0, {}, {ENVIRONMENT: episode.cause})
    if episode.reward is None:
        return None
    return Score(
        episode.reward,
        {ENVIRONMENT: episode.reward, **{f"{ENVIRONMENT}/{name}": value for name, value in episode.parts.items()}},
    )


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its samples, by sample index."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, prompt: Prompt, rollouts: Sequence[Rollout]) -> Group:
        """Create a group of the samples with these rollouts."""
        segment = GivenSegment(Source.PROMPT, np.asarray(prompt.token_ids, dtype=np.int64))
        return cls(prompt, tuple(Sample.of(segment, rollout) for rollout in rollouts))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for sample in self.samples for rollout in sample.rollouts)

    def read_by(self, function: str) -> Group:
        """Return the group with the prompt that a function reads; unchanged if that is the policy's."""
        tokens = self.prompt.read_by.get(function)
        if tokens is None:
            return self
        prompt = GivenSegment(Source.PROMPT, np.asarray(tokens, np.int64))
        return replace(
            self, samples=tuple(replace(each, segments=(prompt, *each.segments[1:])) for each in self.samples)
        )

    def adding(self, score: Sequence[Score] | None = None, **outputs: Sequence[FloatArray]) -> Group:
        """Return the group with scores and per-token outputs added: one value per sample, in order."""
        samples = self.samples
        if score is not None:
            samples = tuple(replace(sample, score=value) for sample, value in zip(samples, score, strict=True))
        for name, values in outputs.items():
            rows = zip(samples, values, strict=True)
            samples = tuple(replace(sample, outputs={**sample.outputs, name: value}) for sample, value in rows)
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
        """Return the samples with a failed reward."""
        return (sample for sample in self.samples if sample.scored.failures)


@dataclass(frozen=True, slots=True)
class Example(Prompt):
    """A prompt with its demonstrated response, or with the chosen and then the rejected response."""

    sequences: tuple[tuple[int, ...], ...] = ()
    """Token ids of prompt and response, per response."""
    learned_from: tuple[int, ...] = ()
    """Position of the first learned token, per sequence."""
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Learned positions [start, end) per sequence. If empty, all positions from `learned_from` on are learned."""

    def learned(self, index: int) -> list[bool]:
        """Return which tokens of a sequence are learned, as `[sequence]` booleans."""
        length = len(self.sequences[index])
        spans = self.spans[index] if self.spans else ((self.learned_from[index], length),)
        return [any(start <= position < end for start, end in spans) for position in range(length)]
