"""The messages between the loop and a generation actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from rlhfless.functions.calls import Reply
from rlhfless.prefixes.tree import to_precompute
from rlhfless.records import IntArray, Rollout
from rlhfless.spec import Transport

R = TypeVar("R")

SampleKey = tuple[str, int]
"""(prompt ID, sample index): the name of a sample within its step."""

KvTransfer = Mapping[str, Any]
"""Opaque parameters of a KV transfer between engines. An engine's answer to OFFER is passed to another engine of its
kind."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, the same for all items of a request."""

    max_tokens: int
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleItem:
    """A sample to generate, or to resume where another actor stopped."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    row: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's columns, for an environment; empty without one."""
    session: str = ""
    """Key of the episode's session; empty without an environment."""
    prior: Rollout | None = None
    """The aborted rollout to resume: its tokens are kept, whichever actor generated them, except the last, which is
    generated again."""

    @property
    def key(self) -> SampleKey:
        return (self.prompt_id, self.sample_index)


def replica_of(replicas: Sequence[R], session: object) -> R:
    """Return the replica of a session, by its key: the same one for each actor, step and attempt."""
    return replicas[crc32(str(session).encode()) % len(replicas)]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The samples of one actor in one step."""

    items: tuple[SampleItem, ...]
    sampling: Sampling
    version: str
    """Label of the weight version that must be loaded."""
    actor: str
    progress_interval_s: float
    heartbeat_s: float
    """An engine that is silent for longer than this is considered hung."""
    timeout_s: float
    or_newer: bool = False
    """Also accept a newer version, loaded since the request was made."""
    earlier: Mapping[str, tuple[IntArray, ...]] = field(default_factory=dict)
    """By prompt ID: SampleRequest.earlier."""
    environments: tuple[str, ...] = ()
    """The environment's replicas, which hold the samples' sessions; empty in a run without an environment."""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The prompts of the samples, each once."""
        return list(dict.fromkeys(item.prompt_token_ids for item in self.items))

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The prefixes that several of its prompts share and an actor computes before them, parents first."""
        return to_precompute(self.prompts)


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    """Prefixes whose KV an actor must have before it gets the samples that start with them."""

    prefixes: tuple[tuple[int, ...], ...]
    """Token IDs; each prefix comes after those that it starts with."""
    version: str
    """Label of the weight version that must be loaded: KV of another version is never hit."""
    actor: str
    offers: tuple[KvTransfer | None, ...] = ()
    """By prefix: another actor's offer of its KV. Without an offer the prefix is computed."""
    offer: bool = False
    """Return an offer of the KV of each prefix."""
    or_newer: bool = False
    """As in GenerateRequest."""


@dataclass(frozen=True, slots=True)
class GroupsFinished:
    """Samples that finished since the last message, by prompt.

    A group is the actor's whole share of a prompt's samples or, if some were aborted, the aborted samples and their
    finished siblings. An aborted sample resumes on another actor, so it cannot wait for siblings that still run
    here. Samples aborted together come in one message and resume in one request; otherwise a tail of hundreds of
    groups would open hundreds of streams.
    """

    incarnation: str
    groups: tuple[tuple[Rollout, ...], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The length of a response."""

    tokens: int
    truncated: bool
    """Cut off by max_tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The token counts of one request's samples."""

    incarnation: str
    tokens: Mapping[SampleKey, int]
    """Response tokens of the running samples so far, including tokens that an earlier actor generated."""
    ended: Mapping[SampleKey, Ended] = field(default_factory=dict)
    """Finished samples that wait for their siblings."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a request; the reply carries the whole call's usage."""

    reply: Reply[None]


GenerationEvent = GroupsFinished | Progress | StreamEnd


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that passed its checks."""

    version: str
    """The version's label."""
    transport: Transport | None
    """How the tensors arrived; None if they were already present or the engine does not report it."""
    read_back: int
    """Tensors with elements read back from the engine's layers; only the probe covers the others."""
