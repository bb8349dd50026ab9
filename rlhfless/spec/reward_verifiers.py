"""Rewards that check a response by running something: a maths library, the response itself, a schema.

They run in worker processes (`scoring`), so that a reward that hangs or dies does no harm to the others.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhfless.spec.base import Duration
from rlhfless.spec.json_schemas import schema_validator
from rlhfless.spec.scoring import RewardPart

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
