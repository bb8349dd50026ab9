"""Rewards: each part is scored on its own, logged under its name, and added up with its weight."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, Tokens
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.spec.reward_services import HttpSpec, RewardModelSpec
from rlhfless.spec.reward_verifiers import CodeSpec, JsonSchemaSpec, MathSpec
from rlhfless.spec.scoring import RewardPart


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
    pattern: Annotated[str, Field(max_length=10_000)]
    """Python regular expression, of at most 10,000 characters."""  # a megabyte takes two seconds to compile
    full_match: bool = False
    """The whole response must match."""
    answer_field: str | None = None
    """If given, the first group of the match must equal this column."""
    timeout_s: Duration = 1.0
    """Longest time one match may take: a pattern can backtrack for ever."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_a_group(self) -> RegexSpec:
        if self.answer_field is not None and re.compile(self.pattern).groups < 1:
            raise ValueError("`answer_field` needs a pattern with a group, such as `answer: (.*)`")
        return self


Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")]


class FormatSpec(RewardPart):
    """1 if the response is made of the tags, each once and in this order, with text in each; else 0."""

    type: Literal["format"]
    tags: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")], ...], Field(min_length=1, max_length=64)
    ] = (
        "think",
        "answer",
    )
    """`<think>...</think> <answer>...</answer>`, as in the recipes that follow DeepSeek-R1 (arXiv 2501.12948)."""
    opened: bool = False
    """The prompt already ends with the first opening tag, as with many chat templates: the response starts inside
    it."""
    only: bool = True
    """Only white space is allowed outside the tags."""

    @field_validator("tags")
    @classmethod
    def _differ(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tags)) < len(tags):
            raise ValueError("a tag occurs twice; each may stand in the response once")
        return tags


class LengthPenaltySpec(RewardPart):
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` (soft overlong penalty of DAPO,
    arXiv 2503.14476, eq. 13)."""

    type: Literal["length_penalty"]
    free_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Responses up to this long cost nothing."""
    max_tokens: Tokens
    """Responses this long or longer get -1."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltySpec:
        if self.max_tokens <= self.free_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be larger than free_tokens ({self.free_tokens})")
        return self


class PythonRewardSpec(RewardPart):
    """A callable of your own. docs/rewards.md describes its arguments."""

    type: Literal["python"]
    target: str
    """`package.module:function`; sync or async."""
    batch: bool = False
    """Call it once with lists, instead of once per sample."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for every call."""
    timeout_s: Duration = 60.0
    """Longest time one call may take."""

    @field_validator("target")
    @classmethod
    def _looks_like_a_path(cls, target: str) -> str:
        if not IMPORT_PATH.fullmatch(target):
            raise ValueError("write it as `package.module:function`")
        return target


RewardSpec = Annotated[
    ExactMatchSpec
    | RegexSpec
    | FormatSpec
    | LengthPenaltySpec
    | MathSpec
    | CodeSpec
    | JsonSchemaSpec
    | HttpSpec
    | RewardModelSpec
    | PythonRewardSpec,
    Field(discriminator="type"),
]
"""Rewards: the built-in ones, your own Python callables, and their weighted sum."""
