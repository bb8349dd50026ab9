"""The response's Python code against tests, each in a process of its own (rlhfless.rewards.confinement).

A test is a pair of input and expected output, or code with asserts that runs after the response's code in the same
process.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless import processes
from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.rewards.code_blocks import program_of
from rlhfless.rewards.confinement import CLEAN_UP_S, CodeTask, run_confined
from rlhfless.rewards.protocol import Begin, Done, RewardSample, Unscorable, attempt, column_problems, quote
from rlhfless.spec import CodeSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Test:
    """One test. With `output` None it is `code` that must run to its end, else input for the response's program."""

    __test__ = False  # not a test of pytest

    code: str = ""
    input: str = ""
    output: str | None = None


class CodeReward:
    """Share of tests passed, or whether all are."""

    whole = False

    def __init__(self, spec: CodeSpec) -> None:
        self._spec = spec

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return column_problems(self._spec.tests_field, prompts, _is_tests)

    def prepare(self) -> None:
        """Makes the worker's memory and environment unreadable for the code that it will start."""
        processes.hide_from_others()

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        for index, sample in enumerate(samples):
            yield Begin((index,), self._limit_s(sample))
            yield Done(index, attempt(self._value, sample))

    def _tests(self, sample: RewardSample) -> tuple[Test, ...]:
        return tests_of(find_field(sample.columns, self._spec.tests_field))[: self._spec.max_tests]

    def _limit_s(self, sample: RewardSample) -> float:
        """Twice the time of all tests at their limits, so that the tests' own limits act first."""
        try:
            count = len(self._tests(sample))
        except Unscorable:
            count = 1
        return 2 * count * (self._spec.timeout_s + CLEAN_UP_S)

    def _value(self, sample: RewardSample) -> float:
        tests = self._tests(sample)
        program = program_of(sample.response)
        if program is None:
            return 0.0
        results = (passes(program, test, self._spec) for test in tests)
        return float(all(results)) if self._spec.score == "all" else sum(results) / len(tests)


def tests_of(value: Any) -> tuple[Test, ...]:
    """The tests in a column. Raises Unscorable.

    A text is test code, or JSON of what follows. A mapping has `input` and `output`, or `inputs` and `outputs` as
    lists of equal length. A list has any of these.
    """
    if isinstance(value, str):
        try:
            decoded = json.loads(value) if value.lstrip()[:1] in ("[", "{") else None
        except ValueError:
            decoded = None
        tests = (Test(code=value),) if decoded is None else tests_of(decoded)
    elif isinstance(value, Mapping):
        tests = _pairs(value)
    elif isinstance(value, list | tuple):
        tests = tuple(test for item in value for test in tests_of(item))
    else:
        raise Unscorable(f"a test is a text, or has `input` and `output`; got {quote(repr(value))}")
    if not tests:
        raise Unscorable("there are no tests")
    return tests


def _pairs(value: Mapping[str, Any]) -> tuple[Test, ...]:
    inputs = value.get("inputs", [value.get("input", "")])
    outputs = value.get("outputs", [value.get("output")])
    texts = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs)
    if not texts or not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise Unscorable(f"a test has texts as `input` and `output`; got {quote(repr(value))}")
    return tuple(Test(input=text, output=expected) for text, expected in zip(inputs, outputs, strict=True))


def _is_tests(value: Any) -> bool:
    try:
        tests_of(value)
    except Unscorable:
        return False
    return True


def passes(code: str, test: Test, spec: CodeSpec) -> bool:
    """Run the code with one test, in a confined process."""
    token = secrets.token_hex()
    ended = run_confined(CodeTask(code, test.code, token, test.input), spec)
    if ended.output is None:
        logger.debug("%s", ended.cause)
        return False
    # For a program that is judged by its output, an early exit is a normal end.
    return ended.result == token.encode() if test.output is None else _lines(ended.output) == _lines(test.output)


def _lines(text: str) -> list[str]:
    """The text without white space at the ends of lines and of the whole, as program judges compare it."""
    return [line.rstrip() for line in text.strip().splitlines()]
