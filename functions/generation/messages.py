"""The messages between the loop and a generation actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhfless.functions.base import Reply
from rlhfless.records import IntArray, Rollout

KvOffer = Mapping[str, Any]
"""The data with which a KV connector gets the KV of a prefix from the actor that computed it."""

SampleKey = tuple[str, int]
"""(prompt id, sample index): the name of a sample within its step."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; the same for all items of a request."""

    max_tokens: int
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleItem:
    """One sample to draw, or to continue where another actor stopped."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    prior: Rollout | None = None
    """The aborted rollout to continue: its tokens are kept, whichever actor drew them, but for the last, which
    is drawn again."""

    @property
    def key(self) -> SampleKey:
        return (self.prompt_id, self.sample_index)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The samples of one actor in one step."""

    items: tuple[SampleItem, ...]
    sampling: Sampling
    version: str
    """Label of the weight version that must be loaded: no traffic without it."""
    actor: str
    progress_interval_s: float
    heartbeat_s: float
    """An engine that is silent for longer than this is taken to hang."""
    timeout_s: float
    or_newer: bool = False
    """A newer version will do, too: one that was loaded since."""
    earlier: Mapping[str, tuple[IntArray, ...]] = field(default_factory=dict)
    """By prompt id: SampleRequest.earlier."""


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    """Prefixes whose KV an actor is to have before it gets the samples that begin with them."""

    prefixes: tuple[tuple[int, ...], ...]
    """Token ids, each prefix after those that it begins with."""
    version: str
    """Label of the weight version that must be loaded: KV of another one is never hit."""
    actor: str
    offers: tuple[KvOffer | None, ...] = ()
    """By prefix: another actor's offer of its KV. Without an offer the prefix is computed."""
    offer: bool = False
    """Whether the reply is to offer the KV of each prefix."""
    or_newer: bool = False
    """As in GenerateRequest."""


@dataclass(frozen=True, slots=True)
class GroupsFinished:
    """The samples that have ended since the last message, by prompt: all that this actor was given, or, when some of
    them were aborted, the aborted samples and their siblings that had ended by then. An aborted sample continues on
    another actor, so it cannot wait for siblings that are still running here.

    Samples that are aborted together come in one message, so that they continue in one request: a tail of hundreds of
    groups would otherwise be as many streams."""

    incarnation: str
    groups: tuple[tuple[Rollout, ...], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The length of a response."""

    tokens: int
    truncated: bool
    """It was cut off by max_tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How many tokens the samples of one request have."""

    incarnation: str
    tokens: Mapping[SampleKey, int]
    """Response tokens so far of the running samples, including tokens that an earlier actor drew."""
    ended: Mapping[SampleKey, Ended] = field(default_factory=dict)
    """Samples that have ended and wait for their siblings."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Nothing is left of the request; the reply carries the whole call's usage."""

    reply: Reply[None]


GenerationEvent = GroupsFinished | Progress | StreamEnd
