"""Calls of functions and their replies, as drivers and replicas know them both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlhfless.util.errors import UserError

T = TypeVar("T")

ANSWER_S = 30.0
"""Timeout for an answer of an environment's replica that costs it nothing. It is long, because all cores may be busy.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """The run, attempt and step of a call."""

    run_id: str
    attempt: int
    step: int


@dataclass(frozen=True, slots=True)
class CallUsage:
    """The work of a call, for the ledger."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0
    sequences: int = 0
    size_bytes: int = 0
    version: str = ""
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A result, with the times of the function's body (Unix time) and its work."""

    incarnation: str
    value: T
    start_s: float
    end_s: float
    usage: CallUsage = CallUsage()


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica's description of itself."""

    incarnation: str
    pid: int
    host: str
    pids: tuple[int, ...] = ()
    """Further processes that the replica owns, such as its engine or its ranks."""
    settings_key: str = ""
    """Digest of the settings it was started with: a driver adopts a replica only if its own settings are equal."""
    step: int = 0
    """For a learner: the last training step of its weights."""
    kv_capacity_tokens: int = 0
    """For a generation actor: capacity of its KV cache in tokens; 0 if the engine does not report it."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """For a generation actor: the duration of each phase of its engine's start, by StartPhase."""
    log: str = ""
    """For a generation actor: the file on its host with its engine's output."""


class FunctionBroken(RuntimeError):
    """The replica answers but can no longer work, for example because its engine died. Start a new replica."""


class StaleCall(UserError):
    """A call of another run or an older attempt was refused."""


def settings_key(settings: object) -> str:
    """Return a digest that is equal for equal settings of a function, in any process."""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()
