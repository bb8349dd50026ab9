"""The identity of a set of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BUCKET_BYTES = 256 << 20
"""What a learner's rank gives the engines on its GPU at a time (rlhfless.weights.buckets); a larger tensor takes
several buckets."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The identity of weights: they are the same if run, attempt, step and digest are."""

    run_id: str
    attempt: int
    """Raised at every start or resume of the driver: the fencing token."""
    step: int
    """The number of training steps the weights have seen."""
    digest: str
    """A hash of names, dtypes, shapes and bytes of all tensors (see rlhfless.weights.digest)."""

    @property
    def label(self) -> str:
        """`run/attempt/step/digest`: the name under which the engine records it per token."""
        return f"{self.run_id}/{self.attempt}/{self.step}/{self.digest}"

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        """The inverse of `label`. Raises ValueError for any other text."""
        parts = label.split("/")
        if len(parts) != 4:
            raise ValueError(f"{label!r} is not a weight version: expected run/attempt/step/digest")
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])


class WeightSample(NamedTuple):
    """Elements of a tensor that a learner and an engine compare; plain data, because it goes to an engine's workers."""

    values: bytes
    """The elements that rlhfless.weights.samples chooses, in the published dtype."""
    row_maxima: bytes
    """The largest magnitude of each row with any of them, float32; none of a vector. Scales of quantised layers follow
    from it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The learner's data to check that an engine really serves a version: a short text with its logprobs, and elements
    of the weights themselves."""

    token_ids: tuple[int, ...]  # [probe]
    logprobs: tuple[float, ...]  # [probe - 1]: of token i + 1 given tokens up to i, temperature 1
    samples: Mapping[str, WeightSample] = field(default_factory=dict)
    """By tensor. Empty if weights are not read back from the engine."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The learner's announcement of a version that it has written to the store."""

    version: WeightVersion
    location: str
    """Its location in the store: a path, or a URL."""
    size_bytes: int
    tensors: int
    probe: Probe
