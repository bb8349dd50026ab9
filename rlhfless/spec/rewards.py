"""Rewards. Each is scored and logged separately under its name; the algorithm uses their weighted sum."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, HubPath, Processes, Tokens, without_user
from rlhfless.spec.data import DType, require_template_kwargs
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.spec.learner import RewardPart
from rlhfless.util.errors import first_line

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

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
"""A regular expression with at least one group."""

Columns = str | Annotated[tuple[str, ...], Field(min_length=1, max_length=16)]


class MathSpec(RewardPart):
    """1 if the response's final answer is mathematically equal to the expected one (math-verify), else 0."""

    type: Literal["math"]
    answer_field: str = "answer"
    """Column with the expected answer: a number, LaTeX, or a solution ending in `\\boxed{...}` or `#### ...`."""
    answer_pattern: Pattern | None = None
    """Regular expression whose first group, in its last match in the column, is the expected answer. `null`: use the
    whole column."""
    extraction: Literal["any", "boxed"] = "any"
    """Where to look for the response's answer. `any`: a boxed answer if there is one, else the last LaTeX expression or
    plain number. `boxed`: only in `\\boxed{...}`. If the response has `<answer>...</answer>` tags, only their content
    is searched."""
    cpu_s: Duration = 5.0
    """Maximum CPU seconds to parse and compare one answer; a response that takes longer counts as wrong. CPU time is
    used because wall time would make correct answers wrong on a busy machine."""


class CodeSpec(RewardPart):
    """Runs the response's Python code against tests in a sandboxed process. See docs/rewards.md."""

    type: Literal["code"]
    tests_field: Columns = "tests"
    """Column or columns with the tests: `input`/`output` pairs, test code, or a list of either. The formats of APPS,
    LiveCodeBench, HumanEval, MBPP and others are recognized; see docs/rewards.md."""
    entry_point_field: Columns = ("entry_point", "metadata")
    """Column with the name of the function under test, or with JSON that has it as `func_name`, for tests that do not
    name it. With several columns, the first one present in a row is used."""
    prompt_field: str = "prompt"
    """Column with the text that the response completes, as in HumanEval. If no row has it, the prompt is used."""
    setup_field: Columns = ("test_imports", "test_setup_code")
    """Columns with code to run between the program and the test code, if a row has them."""
    solution_field: str | None = None
    """Column with a correct program or a list of them, such as `canonical_solution`. `rlhfless validate` then runs the
    solutions of up to 16 rows and refuses data whose tests reject their own solutions. `null`: no check."""
    float_tolerance: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Largest absolute or relative difference allowed between a decimal number in an output or result and the expected
    one. Whole numbers must have the same value and strings must be equal. 0: outputs must match exactly as written."""
    score: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0; scoring ends at the first failed test. `fraction`: fraction of tests
    passed."""
    max_tests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum number of tests to run, from the start of the list. `null`: all."""
    cpu_s: Annotated[int, Field(ge=1, le=86_400)] = 5
    """CPU time limit of one test, in seconds."""
    timeout_s: Duration = 30.0
    """Wall-clock limit of one test in seconds, for code that waits. Much longer than `cpu_s`, because correct code
    takes longer on a busy machine."""
    memory_mib: Annotated[int, Field(ge=64, le=MOST_MIB)] = 512
    """Address space limit of one test, in MiB. Python itself takes about 30 MiB."""


class JsonSchemaSpec(RewardPart):
    """1 if the response contains JSON that is valid under a schema, else 0."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = None
    """The schema, in the draft named by its `$schema` (default: 2020-12). It may reference only its own parts. Give
    either this or `schema_field`."""
    schema_field: str | None = None
    """Column with a schema per row, as a mapping or as JSON text."""
    extraction: Literal["any", "whole"] = "any"
    """`any`: the whole response, else its last block tagged as JSON, else its last untagged block, else the last object
    or list in its text. `whole`: the response must be JSON only."""
    timeout_s: Duration = 5.0
    """Time limit per response in seconds; patterns in a schema can backtrack forever."""

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


def _has_a_host_and_no_password(url: str) -> str:
    import httpx  # not needed for specs without such a reward

    without_user(url, "send a token instead: name its environment variable as `token_env`")
    try:
        host, port = httpx.URL(url).host, httpx.URL(url).port
        host.encode("idna")  # as for the DNS lookup
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"not a URL: {error}") from error
    if not host:
        raise ValueError("not a URL: it names no host")
    if port is not None and port > MOST_PORT:
        raise ValueError(f"not a URL: its port {port} is above {MOST_PORT}")
    return url


EndpointUrl = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(_has_a_host_and_no_password)]


class EndpointPart(RewardPart):
    """Keys of rewards that ask an HTTP endpoint, besides its `url`."""

    token_env: str | None = None
    """Environment variable of the scoring replica that holds the bearer token to send. `null`: no token."""
    concurrency: Processes = 8
    """Maximum concurrent requests."""
    timeout_s: Duration = 30.0
    """Timeout of one request in seconds, and the longest `Retry-After` that is honored."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Retries after a connection failure, a timeout, or status 408, 429 or 5xx. Delays are 0.5, 1, 2, ... s, at
    most 30 s, or the response's `Retry-After`, at least 0.1 s."""


class HttpSpec(EndpointPart):
    """Scores from an HTTP endpoint that samples are POSTed to as JSON. See docs/rewards.md for the protocol."""

    type: Literal["http"]
    url: EndpointUrl
    """Address of the endpoint. Must not contain a user or password."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Samples per request."""


PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
"""A value of a judge's template. Braces around anything else, such as those of JSON, are text."""

JUDGED_SAMPLE = ("prompt", "response", "transcript")
JUDGED_GROUP = ("prompt", "responses")


JUDGE_PREFIX = "judge_"
"""Prefix of the functions of judges with a `path`."""

_OF_URL = ("model", "token_env", "concurrency", "timeout_s", "retries")
_OF_PATH = ("dtype", "trust_remote_code", "tensor_parallel_size", "kv_cache_gib", "max_context_tokens")
_BODY_OF_PATH = frozenset({"chat_template_kwargs", "max_tokens", "seed", "stop", "temperature", "top_k", "top_p"})
"""Keys of `body` that a judge with a `path` has; of those that name a sampling setting, vLLM's meaning."""


class JudgeSpec(EndpointPart):
    """The verdict of a language model: behind an OpenAI-compatible server (`url`), or in a function of its own (`path`)
    that holds devices only while it judges. See docs/judges.md."""

    type: Literal["judge"]
    url: EndpointUrl | None = None
    """Base URL of the server, such as `http://judge:8000/v1`. Must not contain a user or password. Give either this or
    `path`."""
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the model, as the server at `url` knows it."""
    path: HubPath | None = None
    """Folder or hub name of a model with a chat template, in Hugging Face format. It runs in an engine of the function
    `judge_<name>`, on the learner's devices, while there are responses to judge. Give either this or `url`."""
    dtype: DType = "bfloat16"
    """Number format of the model at `path`."""
    trust_remote_code: bool = False
    """Run code that comes with the model at `path`."""
    tensor_parallel_size: Processes = 1
    """Devices of the engine of `path`, on one node."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] = 1.0
    """KV cache of the engine of `path` on each of its devices, in GiB. More judges more responses at the same time."""
    max_context_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] | None = None
    """Longest question and answer of the model at `path`, in tokens. `null`: the model's own limit, or as many as its
    KV cache holds."""
    template: Annotated[str, Field(min_length=1, max_length=100_000)]
    """The question to the judge. `{prompt}` and `{response}` (or `{responses}` with `per: group`), `{transcript}` of an
    episode and columns such as `{answer}` or `{extra.rubric}` are replaced by fenced texts; `{id}` is the fence, which
    the verdict must then repeat. `{columns.prompt}` is a column with a name of these. Other braces are text."""
    system: Annotated[str, Field(max_length=100_000)] = "You are a fair and strict judge."
    """System message. It is followed by the rule that fenced texts are data, not instructions."""
    per: Literal["sample", "group"] = "sample"
    """`sample`: one request per response. `group`: one request with all responses to a prompt, numbered from 1; the
    verdict is a JSON list with a number for each."""
    verdict: Literal["number", "json", "regex", "yes_no"] = "number"
    """How the verdict is read. `number`: the whole answer is a number. `json`: the whole answer is a JSON object, with
    the number under `verdict_key`. `regex`: the first group of `verdict_pattern`, which must be the same in all
    matches. `yes_no`: the probability of `yes` against `no` as the first token (needs logprobs). Text before
    `</think>` does not count."""
    verdict_key: Annotated[str, Field(min_length=1, max_length=256)] = "score"
    """Key of the number, or of the list of numbers, in a `json` verdict."""
    verdict_pattern: Pattern | None = None
    """Regular expression of a `regex` verdict, such as `Score: (\\d+)`."""
    minimum: float = 0.0
    """Smallest valid verdict; a lower one is a failure."""
    maximum: float = 10.0
    """Largest valid verdict; a higher one is a failure. `yes_no` gives 0 to 1."""
    max_tokens: Tokens = 1024
    """Maximum tokens of an answer. One that is cut off is a failure."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the judge."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of each request, such as `reasoning_effort` or `chat_template_kwargs`; `null` removes a key."""

    @property
    def function(self) -> str:
        """The name of the function of a judge with a `path`."""
        return f"{JUDGE_PREFIX}{self.label}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the template names."""
        known = {*JUDGED_SAMPLE, *JUDGED_GROUP, "id"}
        names = (name for name in PLACEHOLDER.findall(self.template) if name not in known)
        return tuple(dict.fromkeys(name.removeprefix("columns.") for name in names))

    @model_validator(mode="after")
    def _one_source(self) -> JudgeSpec:
        if (self.url is None) == (self.path is None):
            what = "neither url nor path" if self.url is None else "both url and path"
            raise ValueError(f"the judge {self.label!r} has {what}; give one of them")
        source, others = ("path", _OF_URL) if self.url is None else ("url", _OF_PATH)
        fields = type(self).model_fields
        if unused := [key for key in others if getattr(self, key) != fields[key].default]:
            raise ValueError(f"`{unused[0]}` would not be used by a judge with a `{source}`; leave it out")
        if self.url is not None:
            if self.model is None:
                raise ValueError("`model` is missing: name the model as the server at `url` knows it")
            return self
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", self.label):
            raise ValueError(
                f"`name`: {self.label!r} names no function; use lower-case letters, digits and _, a letter first"
            )
        if other := sorted(self.body.keys() - _BODY_OF_PATH):
            known = ", ".join(sorted(_BODY_OF_PATH))
            raise ValueError(f"`body`: a judge with a `path` has no {other[0]!r}; it has {known}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> JudgeSpec:
        named = set(PLACEHOLDER.findall(self.template))
        needed, other = ("responses", "response") if self.per == "group" else ("response", "responses")
        if self.per == "sample" and "transcript" in named:
            needed = "transcript" if "response" not in named else "response"
        if needed not in named:
            raise ValueError(f"`template`: `per: {self.per}` needs `{{{needed}}}`, which the judge is to judge")
        if wrong := named & ({other} if self.per == "sample" else {other, "transcript"}):
            raise ValueError(f"`template`: `{{{min(wrong)}}}` is not available with `per: {self.per}`")
        if self.per == "group" and self.verdict != "json":
            raise ValueError(f"`per: group` needs `verdict: json`, not {self.verdict!r}: one number per response")
        if (self.verdict == "regex") != (self.verdict_pattern is not None):
            raise ValueError("`verdict: regex` needs `verdict_pattern`, and no other verdict has one")
        if self.verdict in ("number", "yes_no") and "id" in named:
            raise ValueError(f"`template`: `{{id}}` cannot be repeated in a verdict of type {self.verdict!r}")
        if not self.minimum < self.maximum:
            raise ValueError(f"minimum ({self.minimum:g}) must be below maximum ({self.maximum:g})")
        if fixed := {"messages", "model", "stream", "n"} & self.body.keys():
            raise ValueError(f"`body`: it may not set {min(fixed)!r}")
        return self


class RewardModelSpec(RewardPart):
    """The score of a sequence-classification model with one label, on its own replica."""

    type: Literal["reward_model"]
    path: HubPath
    """Folder or hub name of the model in Hugging Face format, with its tokenizer."""
    dtype: DType = "bfloat16"
    """Number format of weights and products. `bfloat16` is how reward models are published; `float32` is exact but
    slower."""
    chat_template: bool = False
    """Score the conversation as rendered by the reward model's own template, instead of prompt + response."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments for this template, as `prompts.chat_template_kwargs`."""
    prompt_field: str | None = None
    """Column with the prompt for this model, as text or chat messages. `null`: the prompt as the policy saw it. If the
    policy has a chat template, the raw prompt is under `prompts.prompt_field`."""
    max_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 4096
    """Maximum sequence length in tokens. Longer sequences are truncated at the start, so that the end of the response
    is always scored."""
    micro_batch_tokens: Tokens = 8192
    """Maximum tokens per forward pass, including padding. Limits memory use."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

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
    """Regular expression whose first group, in its last match in the column, is the expected answer, such as `####
    (.*)` for GSM8K. `null`: use the whole column."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    ignore_case: bool = False
    """Ignore case."""


class RegexSpec(RewardPart):
    """1 if the pattern is found in the response, else 0."""

    type: Literal["regex"]
    pattern: Annotated[str, Field(max_length=10_000)]
    """Python regular expression, at most 10,000 characters."""  # a megabyte takes two seconds to compile
    full_match: bool = False
    """Require the whole response to match."""
    answer_field: str | None = None
    """Column that the first group of the match must equal. `null`: any match counts."""
    answer_pattern: Pattern | None = None
    """Regular expression whose first group, in its last match in the column, is the expected answer, such as `####
    (.*)` for GSM8K. `null`: use the whole column."""
    timeout_s: Duration = 1.0
    """Time limit of one match in seconds; a pattern can backtrack forever."""

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
    """1 if the response consists of the given tags, each exactly once, in order and non-empty; else 0."""

    type: Literal["format"]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1, max_length=64)] = ("think", "answer")
    """Tag names. The default requires `<think>...</think> <answer>...</answer>`, as in recipes based on DeepSeek-R1
    (arXiv 2501.12948)."""
    opened: bool = False
    """Set this if the prompt already ends with the first opening tag, as with many chat templates, so that the response
    starts inside it."""
    only: bool = True
    """Allow only white space outside the tags."""

    @field_validator("tags")
    @classmethod
    def _differ(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tags)) < len(tags):
            raise ValueError("a tag occurs twice; each may occur once in a response")
        return tags


class LengthPenaltySpec(RewardPart):
    """Length penalty: 0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` (soft overlong punishment of
    DAPO, arXiv 2503.14476, eq. 13)."""

    type: Literal["length_penalty"]
    free_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Response length without a penalty, in tokens."""
    max_tokens: Tokens
    """Response length in tokens from which the penalty is -1. Must be larger than `free_tokens`."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltySpec:
        if self.max_tokens <= self.free_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be larger than free_tokens ({self.free_tokens})")
        return self


class PythonRewardSpec(RewardPart):
    """Your own callable. See docs/rewards.md for its arguments."""

    type: Literal["python"]
    target: str
    """Import path, `package.module:function`. The function may be sync or async."""
    batch: bool = False
    """Call it once with lists instead of once per sample."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments for every call."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Parameters to fill from a column with a different name (nested ones with dots) or from a value that every sample
    has: `{solution_str: response, ground_truth: reward_model.ground_truth}`."""
    timeout_s: Duration = 60.0
    """Time limit of one call, in seconds."""

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
    | JudgeSpec
    | RewardModelSpec
    | PythonRewardSpec,
    Field(discriminator="type"),
]
"""A built-in reward or your own Python callable."""


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_validator(schema: Any) -> Validator:
    """Return a validator of the draft that the schema names. Raises ValueError if it is not a JSON schema, or refers to
    anything outside itself other than the drafts, which are in memory."""
    # Imported here, so that specs without such a reward do not wait for the import.
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        outside = next(_outside(schema, str(kind.META_SCHEMA["$schema"])), None)
    except jsonschema.SchemaError as error:
        raise ValueError(f"is no JSON schema: {first_line(error)}") from error
    except (AttributeError, TypeError, RecursionError) as error:  # in parts the draft's own schema does not check
        raise ValueError(f"is no JSON schema: {type(error).__name__}: {error}") from error
    if outside is not None:
        raise ValueError(f"refers to {outside!r}, which is not in the schema itself; copy it under `$defs`")
    # The default registry would fetch missing schemas.
    validator: Validator = kind(schema, registry=Registry())
    return validator


def _outside(schema: Any, draft: str) -> Iterator[str]:
    """Yield references that lead out of the schema, in all parts that a reference or keyword reaches."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(draft)
    root = specification.create_resource(schema)
    left = [(REGISTRY.resolver_with_root(root), root)]
    seen = set()
    while left:
        resolver, part = left.pop()
        if id(part.contents) in seen or not isinstance(part.contents, Mapping):
            continue
        seen.add(id(part.contents))
        for reference in filter(None, map(part.contents.get, _REFERENCES)):
            try:
                resolved = resolver.lookup(reference)
            except (Unresolvable, ValueError):
                yield str(reference)
                continue
            left.append((resolved.resolver, specification.create_resource(resolved.contents)))
        left += [(resolver.in_subresource(inner), inner) for inner in part.subresources()]
