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

from rlhfless.records import Episode, EpisodeCall, EpisodeStatus, EpisodeTurn, FinishReason, RouteSpan, VersionSpan
from rlhfless.spec import EnvironmentSpec
from rlhfless.util.text import storable, storable_values

Tokens = tuple[int, ...]


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
    took_s: float = 0.0
    """Seconds until the environment had answered, if it knows better than its caller, which may have left."""

    @property
    def digest(self) -> str:
        """Identifies the answer, to compare a replayed call with the first."""
        return hashlib.sha256(repr((self.text, self.outcome.value, self.reward, self.done)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EnvironmentCall:
    """One call of a tool, or of `observe` (tool `""`), with its answer."""

    number: int
    """Counts the calls of an episode, from 1."""
    turn: int
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
    routes: tuple[RouteSpan, ...] = ()
    """See Rollout."""


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
    conversation: int = 0

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
    conversation: int = 0
    """The model reads it before the next turn of this conversation."""


Segment = ContextSegment | ModelSegment


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. The first segment is the prompt. Segments are in the order of time, those of several conversations
    among each other."""

    key: tuple[str, int]
    """(prompt id, sample index)."""
    segments: tuple[Segment, ...]
    calls: tuple[EnvironmentCall, ...]
    status: EpisodeStatus
    reward: float | None
    """None: `rewards` score it, or it failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the user's own loop returned."""
    environment: str = ""
    digest: str = ""
    cause: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """Causes of failures of the environment, of earlier attempts too."""
    until_failure: tuple[tuple[int, str], ...] = ()
    """Turn and tool of each call up to the first one that failed, which is the last; empty if none failed."""
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

    @property
    def model_turns(self) -> tuple[tuple[int, ModelSegment], ...]:
        """Each turn with its position in the response, the tokens after the first segment."""
        turns, at = [], -len(self.segments[0].token_ids) if self.segments else 0
        for segment in self.segments:
            if isinstance(segment, ModelSegment):
                turns.append((at, segment))
            at += len(segment.token_ids)
        return tuple(turns)

    def episode(self) -> Episode:
        """Return the record of the episode; its rollout has the tokens."""
        turns = tuple(
            EpisodeTurn(
                start=start,
                end=start + len(turn.token_ids),
                seed=turn.seed,
                finish_reason=str(turn.generated.finish_reason),
                text=storable(turn.text),
                parsed=str(turn.parsed),
                started_s=turn.started_s,
                ended_s=turn.ended_s,
                cached_tokens=turn.generated.cached_tokens,
                reward=turn.reward,
                conversation=turn.conversation,
            )
            for start, turn in self.model_turns
        )
        calls = tuple(
            EpisodeCall(
                number=call.number,
                turn=call.turn,
                tool=call.tool,
                arguments=storable_values({"arguments": call.arguments})["arguments"],
                outcome=str(call.answer.outcome),
                text=call.answer.text,
                reward=call.answer.reward,
                done=call.answer.done,
                wait_s=call.wait_s,
                call_id=call.call_id,
                cut_tokens=call.cut_tokens,
            )
            for call in self.calls
        )
        return Episode(
            opening=self.segments[0].token_ids if self.segments else (),
            turns=turns,
            calls=calls,
            status=self.status,
            reward=self.reward,
            parts=self.parts,
            environment=self.environment,
            digest=self.digest,
            cause=self.cause,
            failures=self.failures,
            until_failure=self.until_failure,
        )

    def prompts(self) -> Iterator[tuple[Tokens, ModelSegment]]:
        """Yield each turn with all tokens before it in its conversation."""
        before: dict[int, Tokens] = {}
        for segment in self.segments:
            read = before.get(segment.conversation, ())
            if isinstance(segment, ModelSegment):
                yield read, segment
            before[segment.conversation] = read + segment.token_ids


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


_DEFAULT = EnvironmentSpec(type="module:Class")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode; see EnvironmentSpec, which has the defaults."""

    turns: int = _DEFAULT.turns
    turn_tokens: int = _DEFAULT.turn_tokens
    context_tokens: int = 32_768
    """Tokens of the whole episode, with its prompt."""
    result_tokens: int = _DEFAULT.result_tokens
    call_s: float = _DEFAULT.call_s
    episode_s: float = _DEFAULT.episode_s
    invalid_calls: int = _DEFAULT.invalid_calls
    retries: int = _DEFAULT.retries

    @classmethod
    def of(cls, spec: EnvironmentSpec, context_tokens: int) -> EpisodeLimits:
        """Return the limits of a run's episodes."""
        return cls(
            spec.turns,
            spec.turn_tokens,
            context_tokens,
            spec.result_tokens,
            spec.call_s,
            spec.episode_s,
            spec.invalid_calls,
            spec.retries,
        )


def _derived(seed: int, what: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
