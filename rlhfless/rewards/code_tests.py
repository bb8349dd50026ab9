"""Parse the tests in a row's columns: the shapes of APPS, LiveCodeBench, HumanEval, MBPP and others.

A shape is recognised by its fields; an unknown shape or field is refused, never ignored.
"""

from __future__ import annotations

import ast
import base64
import binascii
import math
import pickletools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlhfless.records.fields import MissingField, field_value
from rlhfless.rewards.code_checks import read_test_code
from rlhfless.rewards.protocol import Unscorable, described, quote
from rlhfless.spec import CodeSpec
from rlhfless.spec.explain import nearest
from rlhfless.util.text import parsed_json


@dataclass(frozen=True, slots=True)
class OutputTest:
    """Standard input for the program, and its expected output."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call of the program's function, and its accepted results, as JSON values."""

    function: str
    arguments: tuple[Any, ...]
    accepted: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CodeTest:
    """Code that runs after the program, in its namespace."""

    source: str
    function: str = ""
    """The function under test, if the code needs its name."""


Test = OutputTest | CallTest | CodeTest

_OUTPUT_TYPES = ("stdin", "stdin_stdout", "stdio", "standard_input")
_CALL_TYPES = ("functional", "function_call", "call_based")
_FIELDS = ("input", "output", "inputs", "outputs", "fn_name", "func_name", "testtype", "type", "metadata")
_LISTS = ("test_cases", "tests", "assert_case", "functional")
_FUNCTION = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*")
_PACKED_BYTES = 1 << 29
_SHOWN = "a test is code with asserts, or has `input` and `output`"


def tests_of(columns: Mapping[str, Any], spec: CodeSpec) -> tuple[Test, ...]:
    """Return the tests of a row, at least one. Raises Unscorable for a test that cannot run or would check nothing."""
    fields = _names(spec.tests_field)
    reader = _Reader(columns, spec)
    tests: list[Test] = []
    for field in fields:
        try:
            value = field_value(columns, field)
        except MissingField as error:
            hint = error.hint or "name the column with the tests as `tests_field`"
            raise Unscorable(f"there is no column `{field}`: {error.what}; {hint}".rstrip("; .")) from error
        if len(fields) > 1 and _is_blank(value):
            continue
        try:
            tests += reader.tests(value)
        except Unscorable as error:
            raise Unscorable(f"the column `{field}` holds {quote(str(value))}: {error}") from error
    if not tests:
        raise Unscorable(f"there is no test in {' and '.join(f'`{field}`' for field in fields)}")
    outputs = [test for test in tests if isinstance(test, OutputTest)]
    if len(outputs) == len(tests) and not any(test.output.strip() for test in outputs):
        what = f"all expected outputs in `{fields[0]}` are empty: a program that does nothing would pass"
        raise Unscorable(f"{what}; remove the row, or fill them in")
    return tuple(tests)


def entry_point(columns: Mapping[str, Any], spec: CodeSpec) -> str:
    """Return the name of the function under test from the row's columns; empty if absent. Raises Unscorable."""
    for field in _names(spec.entry_point_field):
        if name := _function_of(_column(columns, field, spec, "entry_point_field"), f"the column `{field}`"):
            return name
    return ""


def _column(columns: Mapping[str, Any], field: str, spec: CodeSpec, key: str) -> Any:
    """Return a column; None if it is missing. Raises Unscorable if it is missing and the spec sets `key`."""
    try:
        return field_value(columns, field)
    except MissingField as error:
        if key in spec.model_fields_set:
            raise Unscorable(f"there is no column `{field}` ({key}): {error.what}") from error
        return None


def _is_blank(value: Any) -> bool:
    """Whether a test column is empty."""
    if isinstance(value, Mapping):
        return not any(value.values())
    return value is None or value in ("", [], (), "[]", "{}")


def _names(fields: str | Sequence[str]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)


def _function_of(value: Any, where: str) -> str:
    """Parse a function's name, or `func_name` in JSON; empty if absent. Raises Unscorable."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = parsed_json(value)
        except ValueError as error:
            raise Unscorable(f"{where} holds {quote(value)}, which is not JSON: {error}") from error
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("func_name", "fn_name", "entry_point") if value.get(key)), None)
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value.strip()):
        raise Unscorable(f"{where} holds {quote(str(value))}, which is not a function name")
    return value.strip()


def _numbered(items: Sequence[Any], read: Callable[[Any], Iterable[Test]]) -> Iterator[Test]:
    """Yield the tests of all items; an error names the item."""
    for number, item in enumerate(items, 1):
        try:
            yield from read(item)
        except Unscorable as error:
            raise Unscorable(f"test {number} of {len(items)}: {error}") from error


class _Reader:
    """Parse test values of one row."""

    def __init__(self, columns: Mapping[str, Any], spec: CodeSpec) -> None:
        self._columns = columns
        self._spec = spec

    def tests(self, value: Any) -> Iterator[Test]:
        """Yield the tests in a value. Raises Unscorable."""
        if isinstance(value, str):
            yield from self._of_text(value)
        elif isinstance(value, Mapping):
            yield from self._of_mapping(value)
        elif isinstance(value, list | tuple):
            if not value:
                raise Unscorable("the list is empty: there is nothing to run; remove the row, or fill it in")
            yield from _numbered(value, self.tests)
        else:
            raise Unscorable(f"it is {described(value)}; {_SHOWN}")

    def _of_text(self, text: str) -> Iterator[Test]:
        text = _unpacked(text)
        if not text.strip():
            raise Unscorable("the text is empty: there is nothing to run; remove the row, or fill it in")
        if text.lstrip()[:1] in ("[", "{"):
            try:
                decoded = parsed_json(text)
            except ValueError as error:
                if not _parses(ast.parse, text):
                    raise Unscorable(f"it is neither JSON ({error}) nor Python") from error
            else:
                yield from self.tests(decoded)
                return
        if text.lstrip()[:1] in ("[", "{", "(") and _parses(ast.literal_eval, text.strip()):
            raise Unscorable("it is a value of Python as text; write it as JSON")
        yield self._of_code(text)

    def _of_code(self, text: str) -> CodeTest:
        setup = self._setup()
        source = f"{setup}\n{text}" if setup else text
        found = read_test_code(source)
        function = entry_point(self._columns, self._spec) if found.candidate else ""
        if found.candidate and not function:
            what = f"the test needs the function under test (`candidate`), and no column {self._entry_points()} has it"
            raise Unscorable(f"{what}; name the column with the function's name as `entry_point_field`")
        if function:
            _column(self._columns, self._spec.prompt_field, self._spec, "prompt_field")
        return CodeTest(source, function)

    def _entry_points(self) -> str:
        return " or ".join(f"`{name}`" for name in _names(self._spec.entry_point_field))

    def _setup(self) -> str:
        parts: list[str] = []
        for field in _names(self._spec.setup_field):
            value = _column(self._columns, field, self._spec, "setup_field")
            lines = [] if value is None else [value] if isinstance(value, str) else value
            if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
                raise Unscorable(f"the column `{field}` must hold code, or a list of it; got {quote(str(value))}")
            parts += [line for line in lines if line.strip()]
        return "\n".join(parts)

    def _of_mapping(self, value: Mapping[str, Any]) -> Iterator[Test]:
        given = {key: item for key, item in value.items() if item is not None}
        if unknown := [key for key in given if key not in (*_FIELDS, *_LISTS, "language")]:
            near = nearest(str(unknown[0]), _FIELDS)
            raise Unscorable(
                f"a test has the unknown field `{unknown[0]}`; known are {', '.join(_FIELDS)}; {near}".rstrip("; ")
            )
        if (language := given.pop("language", "")) and str(language).lower() not in ("python", "python3", "py"):
            raise Unscorable(f"its `language` is {quote(str(language))}; only Python is run")
        lists = [key for key in _LISTS if key in given]
        if lists:
            if len(given) > 1:
                others = ", ".join(f"`{key}`" for key in given if key != lists[0])
                raise Unscorable(f"it has `{lists[0]}` and also {others}: keep one of them")
            yield from self.tests(given[lists[0]])
        elif "inputs" in given or "outputs" in given:
            if both := [key for key in ("input", "output") if key in given]:
                raise Unscorable(f"a test has `inputs` or `outputs` and also `{both[0]}`: keep one of them")
            yield from self._of_lists(given, given.get("inputs"), given.get("outputs"), "s")
        elif isinstance(given.get("input"), list) and isinstance(given.get("output"), list) and not self._called(given):
            yield from self._of_lists(given, given["input"], given["output"], "")
        else:
            if "output" not in given:
                raise Unscorable(f"a test has no `output`; {_SHOWN}")
            yield self._of_pair(given, given.get("input", ""), given["output"])

    def _of_lists(self, given: Mapping[str, Any], inputs: Any, outputs: Any, plural: str) -> Iterator[Test]:
        names = f"`input{plural}` and `output{plural}`"
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
            raise Unscorable(
                f"{names} must be lists of equal length; got {quote(repr(inputs))} and {quote(repr(outputs))}"
            )
        if len(inputs) != len(outputs):
            raise Unscorable(f"{names} must have equal length; they have {len(inputs)} and {len(outputs)}")
        if not inputs:
            raise Unscorable(f"{names} are empty: there is nothing to run; remove the row, or fill it in")
        yield from _numbered([*zip(inputs, outputs, strict=True)], lambda pair: [self._of_pair(given, *pair)])

    def _called(self, given: Mapping[str, Any]) -> bool:
        """Whether a test calls a function, by its type or a function's name. Raises Unscorable."""
        kinds = [given[key] for key in ("testtype", "type") if given.get(key)]
        for kind in kinds:
            if str(kind).lower() not in (*_OUTPUT_TYPES, *_CALL_TYPES):
                known = ", ".join((*_OUTPUT_TYPES[:2], *_CALL_TYPES[:2]))
                raise Unscorable(f"the test type {quote(str(kind))} is unknown; known are {known}")
        if kinds:
            return str(kinds[0]).lower() in _CALL_TYPES
        return bool(given.get("fn_name") or given.get("func_name"))

    def _of_pair(self, given: Mapping[str, Any], inputs: Any, expected: Any) -> Test:
        if not self._called(given):
            return OutputTest(_text(inputs, "input"), _text(expected, "output"))
        named = (_function_of(given.get(key), f"`{key}`") for key in ("fn_name", "func_name", "metadata"))
        function = next(filter(None, named), "") or entry_point(self._columns, self._spec)
        if not function:
            fields = self._entry_points()
            raise Unscorable(f"a functional test has no `fn_name`, and no column {fields} has the function's name")
        if isinstance(inputs, str):
            arguments = tuple(_json(line, "argument") for line in inputs.split("\n") if line.strip())
            return CallTest(function, arguments, (_json(expected, "output"),))
        if not isinstance(inputs, list | tuple):
            raise Unscorable(f"`input` must be the list of arguments of `{function}`; got {quote(repr(inputs))}")
        value = _plain(expected)
        # APPS wraps most results in a list of one.
        wrapped = isinstance(value, list) and len(value) == 1
        return CallTest(function, tuple(map(_argument, inputs)), (value, value[0]) if wrapped else (value,))


def _text(value: Any, name: str) -> str:
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise Unscorable(f"`{name}` must be a text for a program's standard {name}; got {quote(repr(value))}")
    return value


def _json(value: Any, name: str) -> Any:
    """Parse a value written as JSON or as a Python literal."""
    if not isinstance(value, str):
        return _plain(value)
    try:
        return parsed_json(value)
    except ValueError as error:
        try:
            return _plain(ast.literal_eval(value.strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise Unscorable(f"the {name} {quote(value)} of a functional test is not JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Convert tuples to lists, as JSON has them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise Unscorable(f"a functional test holds {quote(repr(value))}, which JSON cannot hold")


def _argument(value: Any) -> Any:
    """Convert an argument of APPS, whose dicts have integer keys that JSON writes as text."""
    value = _plain(value)
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d{1,18}", key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _parses(parse: Callable[[str], Any], text: str) -> bool:
    try:
        parse(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


@lru_cache(maxsize=16)
def _unpacked(text: str) -> str:
    """Unpack LiveCodeBench's private tests: base64, zlib, and a pickle of one text, which is parsed without running it.
    Raises Unscorable."""
    packed = text.strip()
    if not packed.startswith("eJ") and not packed.startswith("eN"):
        return text
    try:
        opened = zlib.decompressobj()
        content = opened.decompress(base64.b64decode(packed, validate=True), _PACKED_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return text
    if opened.unconsumed_tail:
        raise Unscorable(f"the packed tests are larger than {_PACKED_BYTES >> 20} MiB")
    if not content.startswith(b"\x80"):
        return content.decode(errors="replace")
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if "UNICODE" in opcode.name:
                texts.append(str(argument))
            elif opcode.name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"):
                raise Unscorable(f"the packed tests are a pickle of more than a text ({opcode.name}), which is not run")
    except ValueError as error:
        raise Unscorable(f"the packed tests are not a valid pickle: {error}") from error
    if len(texts) != 1:
        raise Unscorable("the packed tests are a pickle of more than a text, which is not run")
    return texts[0]


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
