"""The record of an episode: what the model read and wrote, token by token, and how the environment answered.

The tokens are the record: nothing is rendered or tokenised again. The prompt of each turn is the prompt and all
segments before it. A failed environment leaves no reward, which is not a reward of 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rlhfless.records import FinishReason, GivenSegment, Rollout, Sample, Score, Source, VersionSpan

Tokens = tuple[int, ...]


class EpisodeStatus(StrEnum):
    """How an episode ended. All but FAILED can be scored."""

    DONE = "done"
    """The environment is done, or the model made a turn that it does not answer."""
    TURNS = "turns"
    """The limit of turns."""
    TOKENS = "tokens"
    """No room for another token in the context."""
    TIME = "time"
    """The limit of seconds; there may be no reward."""
    INVALID_CALLS = "invalid_calls"
    """The limit of invalid calls in a row."""
    FAILED = "failed"
    """The environment failed more often than `retries`. There is no reward."""


class Parsed(StrEnum):
    """What a model's turn contains."""

    CALLS = "calls"
    """Tool calls, all with a name and arguments."""
    TEXT = "text"
    INVALID = "invalid"
    """A tool call that cannot be read."""
    UNFINISHED = "unfinished"
    """The turn was cut inside a thought or a tool call."""


class Origin(StrEnum):
    """What wrote the tokens of a ContextSegment."""

    PROMPT = "prompt"
    TOOL = "tool"
    OBSERVATION = "observation"
    USER = "user"
    """Messages of the user's own `play`."""


class AnswerOutcome(StrEnum):
    """How the environment answered a call."""

    RESULT = "result"
    REFUSED = "refused"
    """The tool raised ToolError."""
    INVALID = "invalid"
    """The model's fault: no such tool, or wrong arguments."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The environment's answer to one call or observation."""

    text: str | None
    """None: `observe` has nothing to say, which ends the episode."""
    outcome: AnswerOutcome = AnswerOutcome.RESULT
    reward: float | None = None
    done: bool = False

    @property
    def digest(self) -> str:
        """Identifies the answer, to compare a replayed call with the first."""
        return hashlib.sha256(repr((self.text, self.outcome.value, self.reward, self.done)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EnvironmentCall:
    """One call of a tool, or of `observe` (tool `""`), with its answer."""

    number: int
    """Counts the calls of an episode, from 1."""
    tool: str
    arguments: Any
    answer: Answer
    wait_s: float
    call_id: str | None = None
    cut_tokens: int = 0
    """Tokens of the answer that the model did not get."""


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A model's turn, as the engine records it."""

    token_ids: Tokens
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    actor: str = ""
    queued_s: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelSegment:
    """Tokens that the model generated in one turn."""

    turn: int
    seed: int
    generated: GeneratedTurn
    text: str
    """As the model wrote it, without the end of the turn."""
    parsed: Parsed
    started_s: float
    ended_s: float
    reward: float | None = None
    """Sum of the rewards of this turn's answers."""

    @property
    def token_ids(self) -> Tokens:
        return self.generated.token_ids


@dataclass(frozen=True, slots=True)
class ContextSegment:
    """Tokens that the model has read but not generated. They are excluded from learning."""

    origin: Origin
    token_ids: Tokens
    bodies: tuple[tuple[int, int], ...] = ()
    """Positions [start, end) of the environment's own text; the others are the chat template's."""


Segment = ContextSegment | ModelSegment


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. The first segment is the prompt."""

    key: tuple[str, int]
    """(prompt id, sample index)."""
    segments: tuple[Segment, ...]
    calls: tuple[EnvironmentCall, ...]
    status: EpisodeStatus
    reward: float | None
    """None: `rewards` score it, or it failed."""
    environment: str = ""
    digest: str = ""
    branch: int = 0
    parent: tuple[str, int, int] | None = None
    """Prompt id, sample index and token position from which this branch continues."""
    cause: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """Causes of failures of the environment, of earlier attempts too."""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def token_ids(self) -> Tokens:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def generated_mask(self) -> tuple[bool, ...]:
        """Whether the model generated each token."""
        return tuple(isinstance(part, ModelSegment) for part in self.segments for _ in part.token_ids)

    @property
    def turns(self) -> tuple[ModelSegment, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, ModelSegment))

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for the environment."""
        return sum(call.wait_s for call in self.calls)

    def sample(self) -> Sample:
        """Return the episode as the learner packs it. A failed one has a failed score, which drops it."""
        segments: list[GivenSegment | Rollout] = []
        for part in self.segments:
            token_ids = np.asarray(part.token_ids, np.int64)
            if isinstance(part, ContextSegment):
                source = Source.PROMPT if part.origin is Origin.PROMPT else Source.ENVIRONMENT
                segments.append(GivenSegment(source, token_ids))
                continue
            generated = part.generated
            rollout = Rollout(
                prompt_id=self.key[0],
                sample_index=self.key[1],
                seed=part.seed,
                token_ids=token_ids,
                logprobs=np.asarray(generated.logprobs, np.float32),
                text=part.text,
                finish_reason=generated.finish_reason,
                version_spans=generated.version_spans,
                actor=generated.actor,
                started_s=part.started_s,
                finished_s=part.ended_s,
                cached_tokens=generated.cached_tokens,
            )
            segments.append(rollout)
        score = None if self.reward is None else Score(self.reward, {"environment": self.reward})
        if self.status is EpisodeStatus.FAILED:
            score = Score(0.0, {}, {"environment": self.cause})
        return Sample(tuple(segments), score)

    def prompts(self) -> Iterator[tuple[Tokens, ModelSegment]]:
        """Yield each turn with all tokens before it."""
        before: Tokens = ()
        for segment in self.segments:
            if isinstance(segment, ModelSegment):
                yield before, segment
            before += segment.token_ids


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode to play."""

    prompt_id: str
    sample_index: int
    row: Mapping[str, Any]
    seed: int
    """Of the sample (`records.sample_seed`)."""
    branch: int = 0
    messages: tuple[Any, ...] = field(default=())
    """The row's prompt as chat messages, before those of `reset`."""

    @property
    def environment_seed(self) -> int:
        return _derived(self.seed, "environment")

    def turn_seed(self, turn: int) -> int:
        """Seed of a turn. Equal seeds in two turns or branches would repeat the same noise."""
        return _derived(self.seed, f"{self.branch}/{turn}")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. All are on by default."""

    turns: int = 16
    turn_tokens: int = 1024
    """Tokens of one turn of the model."""
    context_tokens: int = 32_768
    result_tokens: int = 4096
    """Tokens of one answer of the environment; its middle is cut out."""
    call_s: float = 30.0
    """Seconds of one call. A longer one is a failure of the environment."""
    episode_s: float = 600.0
    """Seconds of an episode. A longer one ends, and is no failure."""
    invalid_calls: int = 3
    """Turns in a row with an invalid call that end an episode."""
    retries: int = 2
    """Failures of the environment after which an episode goes on or starts again."""


def _derived(seed: int, what: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
