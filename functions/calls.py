"""Calls of functions and their replies, as drivers and replicas know them both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    metered_s: float | None = None
    """Seconds that the run has used so far of a replica that it shares with others; None for one of its own."""


@dataclass(frozen=True, slots=True)
class RunShare:
    """What a run uses of a shared engine."""

    busy_s: float
    """Its part of the time of the engine's iterations."""
    waiting: int = 0
    """Requests before the engine."""
    running: int = 0
    present: bool = True
    """Whether the run has not left."""


@dataclass(frozen=True, slots=True)
class SharedNow:
    """The state of an engine that several runs share."""

    fleet: str
    """See rlhfless.scaling.fleets."""
    engine: str
    """Name of its application."""
    incarnation: str
    terms: Mapping[str, Any]
    """What is equal in all of its runs."""
    slots: int
    """Versions that it can have."""
    started_s: float
    """Unix time at which its start began."""
    up_s: float
    """Unix time from which it could generate."""
    now_s: float
    runs: Mapping[str, RunShare]
    """By run id: those that are there, and those that have left."""

    @property
    def idle_s(self) -> float:
        """Seconds in which it was up and generated for no run."""
        return max(self.now_s - self.up_s - sum(each.busy_s for each in self.runs.values()), 0.0)


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
    metered_s: float | None = None
    """See Reply."""
    log: str = ""
    """For a generation actor: the file on its host with its engine's output."""


class FunctionBroken(RuntimeError):
    """The replica answers but can no longer work, for example because its engine died. Start a new replica."""


class StaleCall(UserError):
    """A call of another run or an older attempt was refused."""


def settings_key(settings: object) -> str:
    """Return a digest that is equal for equal settings of a function, in any process."""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()
