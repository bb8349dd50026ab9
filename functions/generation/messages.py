"""What the loop and a generation actor say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfless.functions.base import Reply
from rlhfless.records import Rollout

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
    """One sample to draw, or to go on with where another actor stopped."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    prior: Rollout | None = None
    """The aborted rollout to continue: its tokens are kept, whichever actor drew them."""

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
    beat_s: float
    """An engine that is silent for so long hangs."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Samples of one prompt: all that this actor was given, or those that had ended when others of them were aborted,
    and these. What was aborted goes on elsewhere, and cannot wait for its siblings."""

    incarnation: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The length of a response."""

    tokens: int
    truncated: bool
    """By max_tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the samples of one request are."""

    incarnation: str
    tokens: Mapping[SampleKey, int]
    """So far, of those that are still running; with what they brought along."""
    ended: Mapping[SampleKey, Ended] = field(default_factory=dict)
    """Those that have ended, and wait for their siblings."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Nothing is left of the request; the reply carries the whole call's usage."""

    reply: Reply[None]


GenerationEvent = GroupFinished | Progress | StreamEnd
