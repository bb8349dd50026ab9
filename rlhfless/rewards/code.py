"""Run the response's Python program against the row's tests, each test in its own confined process."""

from __future__ import annotations

import logging
import math
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from rlhfless.records import Prompt
from rlhfless.records.fields import MissingField, field_value, find_field
from rlhfless.rewards.code_blocks import definition_of, program_of
from rlhfless.rewards.code_checks import COUNTER, EQUAL, read_test_code
from rlhfless.rewards.code_tests import CallTest, CodeTest, OutputTest, Test, entry_point, tests_of
from rlhfless.rewards.confinement import CLEAN_UP_S, CodeTask, run_confined
from rlhfless.rewards.protocol import Begin, Done, Failed, RewardSample, Unscorable, described, listed, quote
from rlhfless.spec import CodeSpec
from rlhfless.util import processes
from rlhfless.util.text import parsed_json

# Rows whose own solutions are run, evenly spread.
_MOST_SOLUTIONS = 16

logger = logging.getLogger(__name__)


class CodeReward:
    """Score by the share of tests passed, or 1 if all pass."""

    whole = False

    def __init__(self, spec: CodeSpec) -> None:
        self._spec = spec

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Check the tests of every row, and run up to 16 of the rows' own solutions."""
        faults = []
        for prompt in prompts:
            try:
                tests_of(prompt.columns, self._spec)
            except Unscorable as error:
                faults.append((prompt, str(error)))
        if faults or self._spec.solution_field is None:
            return [listed("the tests cannot be used", faults, len(prompts))] if faults else []
        chosen = prompts[:: max(1, -(-len(prompts) // _MOST_SOLUTIONS))]
        faults = [(prompt, fault) for prompt in chosen if (fault := _solution_fault(prompt, self._spec))]
        # A text alone: of rows that were not chosen the same is not known.
        return [str(listed("the tests fail their own solutions", faults, len(chosen)))] if faults else []

    def prepare(self) -> None:
        """Hide the worker's memory and environment from the code it starts."""
        processes.hide_from_others()

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        for index, sample in enumerate(samples):
            try:
                tests = tests_of(sample.columns, self._spec)[: self._spec.max_tests]
            except Unscorable as error:
                yield Begin((index,), self._spec.timeout_s)
                yield Done(index, Failed(str(error)))
                continue
            # Twice the time of all tests at their limits, so that the tests' own limits act first.
            yield Begin((index,), 2 * len(tests) * (self._spec.timeout_s + CLEAN_UP_S))
            yield Done(index, self._value(sample, tests))

    def _value(self, sample: RewardSample, tests: Sequence[Test]) -> float:
        program = program_of(sample.response, _names_under_test(tests))
        if program is None:
            return 0.0
        sources = sources_of(program, sample.columns, self._spec, sample.prompt)
        results = (passes(sources, test, self._spec) for test in tests)
        return float(all(results)) if self._spec.score == "all" else sum(results) / len(tests)


def _names_under_test(tests: Sequence[Test]) -> set[str]:
    """Return the program names that tests use; none for output tests."""
    names: set[str] = set()
    for test in tests:
        if not isinstance(test, OutputTest):
            names.update(part for part in test.function.replace("()", "").rpartition(".")[2:] if part)
        if isinstance(test, CodeTest):
            names.update(read_test_code(test.source).uses)
    return names


def _solution_fault(prompt: Prompt, spec: CodeSpec) -> str:
    """Run a row's own solution; return what is wrong, or an empty string."""
    assert spec.solution_field is not None
    try:
        value = field_value(prompt.columns, spec.solution_field)
    except MissingField as error:
        return f"there is no column `{spec.solution_field}` (solution_field): {error.what}"
    if isinstance(value, str) and value.lstrip().startswith("["):  # APPS has a list of texts as JSON
        with suppress(ValueError):
            value = parsed_json(value)
    value = value[0] if isinstance(value, list) and value else value
    program = program_of(value) if isinstance(value, str) else None
    if program is None:
        return f"the column `{spec.solution_field}` holds {described(value)}, which is not a program"
    sources = sources_of(program, prompt.columns, spec, prompt.text)
    for number, test in enumerate(tests_of(prompt.columns, spec)[: spec.max_tests], 1):
        if not passes(sources, test, spec):
            return f"the program in the column `{spec.solution_field}` fails test {number}, {quote(str(test))}"
    return ""


def sources_of(program: str, columns: Mapping[str, Any], spec: CodeSpec, prompt: str) -> tuple[str, ...]:
    """Return candidate programs; the first that compiles is run. `prompt` is used if no column has the stub."""
    stub = find_field(columns, spec.prompt_field)
    stub = stub if isinstance(stub, str) else prompt
    try:
        function = entry_point(columns, spec)
    except Unscorable:  # what names no function is a fault where a test needs it
        function = ""
    return programs_of(program, function, stub)


def passes(sources: Sequence[str], test: Test, spec: CodeSpec) -> bool:
    """Run one test in a confined process."""
    token = secrets.token_hex()
    given = test.input if isinstance(test, OutputTest) else ""
    expected = len(test.output.encode(errors="surrogatepass")) if isinstance(test, OutputTest) else 0
    ended = run_confined(CodeTask(tuple(sources), token, given, _what_to_run(test, spec), expected), spec)
    if ended.output is None:
        logger.debug("%s", ended.cause)
        return False
    if isinstance(test, OutputTest):
        return ended.exit_code == 0 and same_output(ended.output, test.output, spec.float_tolerance)
    # An early exit writes no token, and a test that ran no check shows nothing.
    name, _, checks = ended.result.decode(errors="replace").partition(" ")
    return name == token and checks.isdecimal() and int(checks) > 0


def _what_to_run(test: Test, spec: CodeSpec) -> dict[str, Any]:
    """Encode a test for rlhfless.rewards.tested."""
    if isinstance(test, OutputTest):
        return {"kind": "output"}
    if isinstance(test, CallTest):
        accepted, arguments = list(test.accepted), list(test.arguments)
        values = {"function": test.function, "arguments": arguments, "accepted": accepted}
        return {"kind": "call", "float_tolerance": spec.float_tolerance, **values}
    code = read_test_code(test.source)
    return {
        "kind": "code",
        "tests": code.code,
        "counter": COUNTER,
        "equal": EQUAL,
        "function": test.function,
        "check": code.check,
        "functions": code.functions,
        "classes": code.classes,
        "imports": code.imports,
    }


# -- comparing outputs


_NUMBER = re.compile(r"(?<![\w.])([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?!\w|\.\w)", re.ASCII)
"""A number that is not a part of a word."""


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Compare outputs line by line, ignoring trailing white space.

    A decimal number in the expected line, also inside text (`x=0.5`), may differ by `tolerance`, absolute or relative.
    An integer may be written as `2.0`, as in LiveCodeBench's judge.
    """
    lines, wanted = _lines(given), _lines(expected)
    if len(lines) != len(wanted):
        return False
    return all(a == b or (tolerance > 0 and _close_lines(a, b, tolerance)) for a, b in zip(lines, wanted, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _close_lines(given: str, expected: str, tolerance: float) -> bool:
    parts, wanted = (_NUMBER.split(" ".join(line.split())) for line in (given, expected))
    return len(parts) == len(wanted) and all(
        a == b or (number % 2 and _close(a, b, tolerance))  # every second part is a number
        for number, (a, b) in enumerate(zip(parts, wanted, strict=True))
    )


def _close(given: str, expected: str, tolerance: float) -> bool:
    if (digits := expected.lstrip("+-")).isdecimal():  # one that begins with 0 is a name, such as 007
        return (digits == "0" or digits[0] != "0") and Decimal(given) == Decimal(expected)
    a, b = float(given), float(expected)
    return math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))


# -- completing stubs


_CODE = re.compile(r"^[ \t]*(?:import |from \S+ import |def |async def |class )", re.MULTILINE)

_FUTURE = re.compile(r"^from __future__ import [^(\n]*\n", re.MULTILINE)


def programs_of(program: str, function: str, stub: str) -> tuple[str, ...]:
    """Complete a program with its prompt's stub, as in HumanEval; the first candidate that compiles is run.

    A program that defines the function gets the stub's imports and helpers; any other is taken as the function's body.
    """
    program = textwrap.dedent(program).strip("\n")
    name = function.replace("()", "").rpartition(".")[2]
    if "```" in stub or "~~~" in stub:
        stub = program_of(stub) or ""
    if not name or not _CODE.search(stub):
        return (program,)
    head = definition_of(name).search(stub)
    if definition_of(name).search(program):
        start = stub[: head.start()] if head else stub
        future = "".join(_FUTURE.findall(program))  # it must be the first statement
        return (f"{future}{start}\n{_FUTURE.sub('', program)}", program)
    if head is None:
        return (f"{stub}\n{program}", program)
    start = f"{stub.rstrip()}\n"
    last = start.rstrip().rpartition("\n")[2]
    own = last[: len(last) - len(last.lstrip())]
    indentation = own + "    " if last.endswith(":") else own or "    "
    # In the second the first line alone has lost its indentation.
    return (start + textwrap.indent(program, indentation), start + indentation + program.lstrip(), program)
