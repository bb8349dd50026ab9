"""Rewards: each part is scored on its own, logged under its name, and added up with its weight."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, Processes, Tokens, without_user
from rlhfless.spec.data import DType, require_template_kwargs
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.spec.locations import HubPath
from rlhfless.spec.reward_verifiers import CodeSpec, JsonSchemaSpec, MathSpec, Pattern
from rlhfless.spec.scoring import RewardPart

MOST_PORT = 65_535


class HttpSpec(RewardPart):
    """Numbers from an HTTP endpoint. docs/rewards.md has the protocol."""

    type: Literal["http"]
    url: Annotated[str, Field(pattern=r"^https?://")]
    """Samples are POSTed here as JSON. Without a user or a password."""
    token_env: str | None = None
    """Environment variable of the scoring replica that holds the bearer token to send."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Samples per request."""
    concurrency: Processes = 8
    """Requests in flight at a time."""
    timeout_s: Duration = 30.0
    """Longest time one request may take, and longest wait that a server may ask for with `Retry-After`."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Further attempts if there is no connection, no answer in time, or status 408, 429 or 5xx; after 0.5, 1, 2, ...
    s, or after what the answer's `Retry-After` says."""

    @field_validator("url")
    @classmethod
    def _has_a_host_and_no_password(cls, url: str) -> str:
        import httpx  # not needed for specs without such a reward

        without_user(url, "send a token instead: name its environment variable as `token_env`")
        try:
            host, port = httpx.URL(url).host, httpx.URL(url).port
            host.encode("idna")  # as it is looked up
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError(f"not a URL: {error}") from error
        if not host:
            raise ValueError("not a URL: it names no host")
        if port is not None and port > MOST_PORT:
            raise ValueError(f"not a URL: its port {port} is above {MOST_PORT}")
        return url


class RewardModelSpec(RewardPart):
    """The score of a sequence-classification model with one label, on a replica of its own."""

    type: Literal["reward_model"]
    path: HubPath
    """Folder or hub name, in Hugging Face format, with its tokenizer."""
    dtype: DType = "bfloat16"
    """Number format of weights and products. bfloat16, as reward models are published; float32 is exact but slower."""
    chat_template: bool = False
    """Score the conversation as the reward model's own template renders it, rather than prompt + response."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As `prompts.chat_template_kwargs`, for this template."""
    prompt_field: str | None = None
    """Column with the prompt for this model, as text or chat messages. When left out it is the prompt as the
    policy saw it; a policy with a chat template of its own keeps the raw prompt under `prompts.prompt_field`."""
    max_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 4096
    """Longer sequences lose tokens at their beginning, so that the end of the response is always scored."""
    micro_batch_tokens: Tokens = 8192
    """Padded tokens per forward pass; bounds the memory."""
    trust_remote_code: bool = False
    """Run model code that comes with the path."""

    @model_validator(mode="after")
    def _arguments_have_a_template(self) -> RewardModelSpec:
        require_template_kwargs(self.chat_template, self.chat_template_kwargs)
        return self


class ExactMatchSpec(RewardPart):
    """1 if the response equals the answer, else 0."""

    type: Literal["exact_match"]
    answer_field: str = "answer"
    """Column with the expected response."""
    answer_pattern: Pattern | None = None
    """The expected answer is only the first group of this, where the column has it last: `#### (.*)` of GSM8K."""
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
    answer_pattern: Pattern | None = None
    """The expected answer is only the first group of this, where the column has it last: `#### (.*)` of GSM8K."""
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
    tags: Annotated[tuple[Tag, ...], Field(min_length=1, max_length=64)] = ("think", "answer")
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
    fields: dict[str, str] = Field(default_factory=dict)
    """Parameters that are filled from a field of another name, nested ones with dots, or from what every sample has:
    `{solution_str: response, ground_truth: reward_model.ground_truth}`."""
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
