"""Where the state of a sleeping replica is, and what its sleep gave back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SleepTier(StrEnum):
    """Where the state of a replica is while its device's memory is free. The processes stay up in both."""

    HOST = "host"
    """Weights and state are in the host's memory; the KV cache, which no other version could use, is gone."""
    DROPPED = "dropped"
    """Weights are gone, too: the replica serves again after its next load, which an actor between two versions has
    to do in any case. A function whose state exists nowhere else, such as the learner, sleeps in HOST instead."""


@dataclass(frozen=True, slots=True)
class Slept:
    """A replica that sleeps."""

    tier: SleepTier
    """The tier it is in: the one that was asked for, a replica's only one, or the one in which it slept already."""
    freed_bytes: int
    """What its processes held less, as read from its device, or on a CPU from its processes; 0 if it slept already."""
    held_bytes: int
    """What they still hold there."""
