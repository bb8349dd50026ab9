"""The messages between the adapter and the engine's process.

Plain frozen dataclasses; nothing of vLLM is imported, so importing this module is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.spec import Transport

CORE_DIED = 71
"""Exit code of the engine's process when a process that vLLM started has exited; EX_OSERR of sysexits.h."""


# --- worker -> engine process


class Consumed(NamedTuple):
    """The tensors that a worker's model consumed since the last update started; plain data for vLLM's messages."""

    hashes: Mapping[str, bytes]
    """See Digest.hashes."""
    size_bytes: int
    transport: Transport | None
    damage: str | None
    """The fault of a damaged version, if any."""


# --- adapter -> engine process


@dataclass(frozen=True, slots=True)
class Submit:
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Call a method of `loop._CALLS`; answered with `Returned`."""

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
    """Duration of each start phase, by StartPhase."""
    kv_capacity_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 if the engine does not report it."""
    block_tokens: int = 16
    """Tokens per KV cache block."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """The implementations that vLLM chose: model runner, attention, sampler."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Responses that finished in one iteration or were aborted together."""

    ended: tuple[Sampled, ...]
    shares: Mapping[str, float] | None = None
    """See SharedEngine; None if one run has the engine."""


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class EngineProgress:
    tokens: dict[str, int]
    shares: Mapping[str, float] | None = None
    """As in Finished."""


@dataclass(frozen=True, slots=True)
class Returned:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """The last message of a process that cannot continue."""

    trace: str


Answer = Started | Finished | Refused | EngineProgress | Returned | Crashed
"""Messages that the engine's process sends."""
