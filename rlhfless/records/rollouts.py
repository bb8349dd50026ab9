"""Prompts, the responses that an engine draws for them, and the scores of the responses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """It drew an end-of-sequence token or a stop text."""
    LENGTH = "length"
    """It reached max_tokens."""
    ABORT = "abort"
    """Its actor was told to stop; the tokens so far are kept and another actor continues."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the data set, as the policy sees it."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards."""
    source: str = ""
    """The name of the set that it is from, if that has one."""
    where: str = field(default="", compare=False, kw_only=True)
    """The row in its file, as in `train.jsonl:12`, for messages; empty if it is not from a file."""

    @property
    def place(self) -> str:
        """What a message calls it: the row in its file, or else its id."""
        return self.where or f"the prompt {self.prompt_id!r}"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were drawn with this weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """The response that an engine drew for one sample: its answer to a request, and a row of the journal.

    `logprobs` are *rollout* logprobs: the engine's logprobs of the sampled tokens at the sampling temperature.
    """

    prompt_id: str
    sample_index: int
    seed: int
    token_ids: IntArray  # [response]
    logprobs: FloatArray  # [response]
    text: str
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    actor: str
    started_s: float
    finished_s: float
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.prompt_id, self.sample_index)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one rollout and the parts that it is the weighted sum of."""

    total: float
    parts: Mapping[str, float]
    """Value of each part by name, before its weight. A failed part is missing, or 0 if the spec says so."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The cause of each failed part, by name."""

    def plus(self, other: Score) -> Score:
        """The sum of this score and the score of other parts of the same rollout."""
        return Score(self.total + other.total, {**self.parts, **other.parts}, {**self.failures, **other.failures})


def sample_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample: the same whichever actor draws it, and in whatever order.

    63 bits of BLAKE2b, because engines take signed 64-bit seeds and Python's own `hash` differs by process.
    """
    text = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
