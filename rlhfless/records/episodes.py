"""The record of an episode: a response in several turns, with what an environment wrote between them.

The tokens are in the rollout (`Rollout.token_ids`), the environment's among the model's. An Episode says which are
which, and how each came about. A response of one turn has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any


class EpisodeStatus(StrEnum):
    """How an episode ended. All but FAILED can be scored."""

    RUNNING = "running"
    """It was aborted, and will continue on another actor."""
    WAITING = "waiting"
    """It has left its actor while it waits for its environment, and will continue when that has answered."""
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


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """One turn of the model: response tokens [start, end)."""

    start: int
    end: int
    seed: int
    finish_reason: str
    text: str
    """As the model wrote it, without the end of the turn."""
    parsed: str
    """What it contains (rlhfless.environments.trajectory.Parsed)."""
    started_s: float
    ended_s: float
    cached_tokens: int = 0
    """Tokens of its context from the prefix cache."""
    reward: float | None = None
    """Sum of the rewards of this turn's answers."""
    conversation: int = 0
    """Its conversation. What the model read is the tokens of this conversation before it."""


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """One call of a tool, or of `observe` (tool `""`), with the environment's answer."""

    number: int
    """Counts the calls of an episode, from 1."""
    turn: int
    tool: str
    arguments: Any
    outcome: str
    """`result`, `refused` or `invalid` (rlhfless.environments.trajectory.AnswerOutcome)."""
    text: str | None
    reward: float | None
    done: bool
    wait_s: float
    call_id: str | None = None
    cut_tokens: int = 0
    """Tokens of the answer that the model did not get."""


@dataclass(frozen=True, slots=True)
class Episode:
    """How the tokens of a rollout came about."""

    opening: tuple[int, ...]
    """All tokens before the first turn: the prompt, tool schemas, and what `reset` says."""
    turns: tuple[EpisodeTurn, ...]
    calls: tuple[EpisodeCall, ...]
    status: EpisodeStatus
    reward: float | None
    """None: `rewards` score it, or it failed."""
    environment: str
    digest: str
    """Of the environment's source file."""
    cause: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """Causes of failures of the environment, of earlier attempts too."""
    until_failure: tuple[tuple[int, str], ...] = ()
    """Turn and tool of each call up to the first one that failed, which is the last; empty if none failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the user's own loop returned with its reward."""

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for the environment."""
        return sum(call.wait_s for call in self.calls)

    def given(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the spans [start, end) of `tokens` response tokens that the environment wrote."""
        at = 0
        for turn in self.turns:
            if turn.start > at:
                yield at, turn.start
            at = turn.end
        if tokens > at:
            yield at, tokens

    @property
    def conversations(self) -> int:
        """Number of conversations: several if an agent program had sub-agents, or shortened its history."""
        return len({turn.conversation for turn in self.turns})

    @property
    def by_conversation(self) -> list[int]:
        """The numbers of its turns, conversation by conversation."""
        first = {turn.conversation: number for number, turn in reversed([*enumerate(self.turns)])}
        return sorted(range(len(self.turns)), key=lambda number: (first[self.turns[number].conversation], number))

    def earned_before(self) -> list[float]:
        """Return what the turns before each turn have earned."""
        return [0.0, *accumulate(turn.reward or 0.0 for turn in self.turns[:-1])][: len(self.turns)]

    def contexts(self) -> list[int]:
        """Return the tokens that the model read before each turn."""
        read, contexts, at = {0: len(self.opening)}, [], 0
        for turn in self.turns:
            context = read.get(turn.conversation, 0) + turn.start - at
            contexts.append(context)
            read[turn.conversation], at = context + turn.end - turn.start, turn.end
        return contexts

    def transcript(self) -> list[dict[str, Any]]:
        """Return the turns and the environment's answers as chat messages."""
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(self.turns):
            messages.append({"role": "assistant", "content": turn.text})
            for call in self.calls:
                if call.turn == number:
                    role = {"role": "tool", "name": call.tool} if call.tool else {"role": "user"}
                    messages.append({**role, "content": call.text or ""})
        return messages

    def shown(self) -> list[dict[str, Any]]:
        """Return the turns with their calls as JSON values, for people to read."""
        return [
            {
                "text": turn.text,
                "parsed": turn.parsed,
                "reward": turn.reward,
                "calls": [
                    {
                        "tool": call.tool,
                        "arguments": call.arguments,
                        "outcome": call.outcome,
                        "answer": call.text or "",
                        "wait_s": call.wait_s,
                    }
                    for call in self.calls
                    if call.turn == number
                ],
            }
            for number, turn in enumerate(self.turns)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the episode as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Episode:
        """Return the episode that `as_json` gave."""
        return cls(
            **{
                **values,
                "opening": tuple(values["opening"]),
                "turns": tuple(EpisodeTurn(**turn) for turn in values["turns"]),
                "calls": tuple(EpisodeCall(**call) for call in values["calls"]),
                "status": EpisodeStatus(values["status"]),
                "failures": tuple(values["failures"]),
                "until_failure": tuple((turn, tool) for turn, tool in values.get("until_failure", ())),
            }
        )
