"""The messages between a scoring function and its workers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.rewards.protocol import RewardSample


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has made and prepared its rewards."""

    whole: tuple[bool, ...]
    """Per reward: `Verifier.whole`."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker cannot make a reward; it ends after this."""

    reward: str
    what: str


@dataclass(frozen=True, slots=True)
class Task:
    """Score these samples with reward number `reward`."""

    reward: int
    samples: tuple[RewardSample, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The task is done."""
