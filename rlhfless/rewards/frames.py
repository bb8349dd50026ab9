"""What a scoring function and its workers say to each other: pickles with their length before them."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from rlhfless.rewards.protocol import Sample

LENGTH = struct.Struct("!Q")


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
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The task is done."""


def frame(message: Any) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body
