"""Rewards: each part is scored on its own, logged under its name, and added up with its weight."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import SpecModel


class RewardPart(SpecModel):
    """What all rewards share."""

    name: str | None = None
    """Name in logs and traces; the type when left out. Names must differ."""

    weight: float = 1.0
    """Factor in the weighted sum that the algorithm sees."""

    @property
    def label(self) -> str:
        return self.name or str(getattr(self, "type", "reward"))


class ExactMatchSpec(RewardPart):
    """1 if the response equals the answer, else 0."""

    type: Literal["exact_match"]
    answer_field: str = "answer"
    """Column with the expected response."""
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Compare without regard to case."""


class RegexSpec(RewardPart):
    """1 if the pattern is found in the response, else 0."""

    type: Literal["regex"]
    pattern: str
    """Python regular expression."""
    full_match: bool = False
    """The whole response must match."""
    answer_field: str | None = None
    """If given, the first group of the match must equal this column."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_a_group(self) -> RegexSpec:
        if self.answer_field is not None and re.compile(self.pattern).groups < 1:
            raise ValueError("`answer_field` needs a pattern with a group, such as `answer: (.*)`")
        return self


class LengthPenaltySpec(RewardPart):
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` (soft overlong penalty of DAPO,
    arXiv 2503.14476, eq. 13)."""

    type: Literal["length_penalty"]
    free_tokens: Annotated[int, Field(ge=0)]
    """Responses up to this long cost nothing."""
    max_tokens: Annotated[int, Field(ge=1)]
    """Responses this long or longer get -1."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltySpec:
        if self.max_tokens <= self.free_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be larger than free_tokens ({self.free_tokens})")
        return self


class PythonRewardSpec(RewardPart):
    """Any callable of yours. See docs/rewards.md for what it is called with."""

    type: Literal["python"]
    target: str
    """`package.module:function`; sync or async."""
    batch: bool = False
    """Call it once with lists, instead of once per sample."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for every call."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time one call may take."""

    @field_validator("target")
    @classmethod
    def _looks_like_a_path(cls, target: str) -> str:
        if not re.fullmatch(r"[\w.]+:[\w.]+", target):
            raise ValueError("write it as `package.module:function`")
        return target


RewardSpec = Annotated[ExactMatchSpec | RegexSpec | LengthPenaltySpec | PythonRewardSpec, Field(discriminator="type")]
