"""Rewards: each part is scored on its own, logged under its name, and added up with its weight."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, HubPath, Processes, Tokens, without_user
from rlhfless.spec.data import DType, require_template_kwargs
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.spec.json_schemas import schema_validator
from rlhfless.spec.learner import RewardPart

MOST_MIB = 1 << 20
"""1 TiB."""


def _has_a_group(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if groups < 1:
        raise ValueError("it needs a group, such as `#### (.*)`")
    return pattern


Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_has_a_group)]
"""A regular expression with a group."""

Columns = str | Annotated[tuple[str, ...], Field(min_length=1, max_length=16)]


class MathSpec(RewardPart):
    """1 if the response's final answer equals the expected one as mathematics (math-verify), else 0."""

    type: Literal["math"]
    answer_field: str = "answer"
    """Column with the expected answer: a number, LaTeX, or a solution that ends in `\\boxed{...}` or `#### ...`."""
    answer_pattern: Pattern | None = None
    """The expected answer is only the first group of this, where the column has it last."""
    extraction: Literal["any", "boxed"] = "any"
    """Where the response's answer may be. `any`: a boxed answer if there is one, else the last LaTeX expression or
    plain number. `boxed`: only in `\\boxed{...}`. If there are tags `<answer>...</answer>`, only within them."""
    cpu_s: Duration = 5.0
    """CPU time to parse and compare one answer; a response that takes longer is wrong. CPU time, because on a busy
    machine wall time would make right answers wrong."""


class CodeSpec(RewardPart):
    """The response's Python code, run against tests in a confined process: see docs/rewards.md."""

    type: Literal["code"]
    tests_field: Columns = "tests"
    """Column with the tests, or several: pairs of `input` and `output`, test code, or a list of either. The shapes of
    APPS, LiveCodeBench, HumanEval, MBPP and others are recognised: see docs/rewards.md."""
    entry_point_field: Columns = ("entry_point", "metadata")
    """Column with the name of the function under test, or JSON with it as `func_name`, for tests that do not name it.
    Of several the first that a row has."""
    prompt_field: str = "prompt"
    """Column with the text that a response completes, as in HumanEval. If no row has it, the prompt is used."""
    setup_field: Columns = ("test_imports", "test_setup_code")
    """Columns with code that runs between the program and test code, where a row has them."""
    solution_field: str | None = None
    """Column with a right program, or a list of them, such as `canonical_solution`. If given, `rlhfless validate` runs
    that of up to 16 rows, and refuses data whose tests fail their own solutions."""
    float_tolerance: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Largest difference, absolute or relative, of a decimal number in an output or a result from the expected one.
    Whole numbers must have the same value, and texts be the same. 0: all must be written alike."""
    score: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0, and the first test that fails ends the scoring. `fraction`: share of tests
    passed."""
    max_tests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Use only this many tests, the first in the list; by default all."""
    cpu_s: Annotated[int, Field(ge=1, le=86_400)] = 5
    """CPU time of one test."""
    timeout_s: Duration = 30.0
    """Wall time of one test, for code that waits. Much longer than `cpu_s`, because correct code takes longer on a
    busy machine."""
    memory_mib: Annotated[int, Field(ge=64, le=MOST_MIB)] = 512
    """Address space of one test; Python itself takes some 30 MiB."""
    file_mib: Annotated[int, Field(ge=0, le=MOST_MIB)] = 16
    """Largest file a test may write."""
    folder_mib: Annotated[int, Field(ge=1, le=MOST_MIB)] = 64
    """Total size of the files in a test's folder. The folder is in memory if the kernel allows it."""
    folder_files: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Most files and folders in a test's folder."""
    open_files: Annotated[int, Field(ge=16, le=65_536)] = 64
    """Most files that a test may have open."""
    output_kib: Annotated[int, Field(ge=1, le=MOST_MIB)] = 256
    """A test with a longer output fails. Where the expected output is longer than half of this, twice its length is
    allowed."""

    @model_validator(mode="after")
    def _files_fit_in_the_folder(self) -> CodeSpec:
        if self.file_mib > self.folder_mib:
            what = f"file_mib ({self.file_mib}) is above folder_mib ({self.folder_mib}), which holds all files"
            raise ValueError(f"{what}: raise folder_mib, or lower file_mib")
        return self


class JsonSchemaSpec(RewardPart):
    """1 if the response holds JSON that follows a schema, else 0."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = None
    """The schema, in the draft that its `$schema` names (2020-12 without one). It may refer to its own parts only."""
    schema_field: str | None = None
    """Column with each row's own schema, as a mapping or as JSON text."""
    extraction: Literal["any", "whole"] = "any"
    """`any`: the whole response, else its last block tagged as JSON, else its last untagged block, else the last object
    or list in its text. `whole`:
    the response must be JSON and nothing else."""
    timeout_s: Duration = 5.0
    """Longest time for one response: patterns in a schema can backtrack for ever."""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaSpec:
        if (self.json_schema is None) == (self.schema_field is None):
            raise ValueError("give either `json_schema` or `schema_field`")
        if self.json_schema is not None:
            try:
                schema_validator(self.json_schema)
            except ValueError as error:
                raise ValueError(f"`json_schema`: it {error}") from error
        return self


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
