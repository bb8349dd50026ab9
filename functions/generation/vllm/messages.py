"""The messages between the adapter and the engine's process.

Plain frozen dataclasses; nothing of vLLM is imported, so importing this costs callers neither the time nor the memory
of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.spec import Transport

CORE_DIED = 71
"""Exit code of the engine's process when one that vLLM started has ended; EX_OSERR of sysexits.h."""


# --- worker -> engine process


class Consumed(NamedTuple):
    """What a worker's model consumed since the last start of an update; plain data, which vLLM's messages carry."""

    hashes: Mapping[str, bytes]
    """See Digest.hashes."""
    size_bytes: int
    transport: Transport | None
    damage: str | None
    """What was wrong with the version, if anything was."""


# --- adapter -> engine process


@dataclass(frozen=True, slots=True)
class Submit:
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Run a method of `loop.CALLS` and answer with `Returned`."""

    call_id: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# --- engine process -> adapter


@dataclass(frozen=True, slots=True)
class Started:
    seconds: dict[str, float]
    """Duration of each phase of the start, by StartPhase."""
    kv_capacity_tokens: int = 0
    """Tokens that the KV cache holds; 0 where the engine does not say."""
    block_tokens: int = 16
    """Tokens of a block of the KV cache."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """The code that vLLM chose: model runner, attention, sampler."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Responses that ended in one iteration, or that were aborted together."""

    ended: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class EngineProgress:
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Returned:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """The last message of a process that cannot go on."""

    trace: str


Answer = Started | Finished | Refused | EngineProgress | Returned | Crashed
"""Messages that the engine's process sends."""
