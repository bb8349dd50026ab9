"""What an episode needs from an environment and from a model, and the messages of a worker process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfless.chat.messages import Message
from rlhfless.environments.contract import Description, EnvironmentSource
from rlhfless.environments.trajectory import Answer, GeneratedTurn
from rlhfless.spec.errors import Problem
from rlhfless.util.text import legible, redacted_text


class EnvironmentFailed(Exception):
    """The environment failed: an exception, a hang, a lost process. Never a reward; the message is the cause."""

    def __init__(self, cause: str) -> None:
        super().__init__(redacted_text(legible(cause)))


@dataclass(frozen=True, slots=True)
class Opening:
    """What `reset` gives: messages after the row's prompt, and the tools of this episode."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """A user's own loop asks for a turn of the model; the parent replies with a ModelAnswer, or None at a limit."""

    messages: tuple[Message, ...]
    """What is new in its conversation."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the model may call. They are the same in all turns of a conversation."""
    max_tokens: int | None = None
    """Limit of this turn, besides `turn_tokens`."""
    conversation: int = 0
    """Which one it is; a new number begins a conversation."""
    token_ids: tuple[int, ...] | None = None
    """What is new in its conversation, in place of messages."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A turn of the model."""

    message: Message
    is_cut: bool = False
    """It ended at a limit of tokens."""
    context_tokens: int = 0
    """Tokens before the turn."""
    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """The turn's tokens, for one that was asked for by tokens."""
    logprobs: tuple[float, ...] = ()
    """Of `token_ids`."""


ModelTurn = Callable[[ModelAsked], Awaitable[ModelAnswer | None]]
"""Adds messages to a conversation, and returns the model's next turn; None at a limit of the episode."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """What a user's own loop returns."""

    reward: float | None = None
    """None: `rewards` score the episode."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, which are recorded."""


class EnvironmentSession(Protocol):
    """One episode's environment. Every method raises EnvironmentFailed."""

    @property
    def resumed(self) -> bool:
        """Whether the session was open already, with the calls that another actor made: they are not made again."""
        ...

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening: ...

    async def call(self, number: int, tool: str, arguments: Any) -> Answer:
        """Call a tool, or `observe` with a text (tool `""`). The model's mistakes are answers.

        Asked again with the number of the last call, a session returns the same answer without another call.
        """
        ...

    async def reward(self) -> float | None:
        """Return the reward of the episode; None without `reward()`."""
        ...

    async def snapshot(self) -> bytes: ...

    async def restore(self, state: bytes) -> Opening:
        """Continue from a snapshot in place of `reset`."""
        ...

    async def play(self, seed: int, row: Mapping[str, Any], turn: ModelTurn) -> PlayResult:
        """Run the user's own loop."""
        ...


class OpenSession(Protocol):
    """Creates sessions of one environment."""

    @property
    def description(self) -> Description: ...

    def session(self) -> AbstractAsyncContextManager[EnvironmentSession]: ...


class Model(Protocol):
    """Generates one turn."""

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn: ...


# -- messages between a worker process and its parent


@dataclass(frozen=True, slots=True)
class Load:
    """Load an environment."""

    source: EnvironmentSource
    memory_bytes: int
    """Address space that its sessions may add to that of the process after its import."""


@dataclass(frozen=True, slots=True)
class EnvironmentLoaded:
    description: Description | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a method of the session; `reset`, `restore` and `play` begin a new one."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReply:
    value: Any
    failed: str = ""
    """The cause, if the method failed."""
