"""The `code` reward: find the Python program in a response, and run it against the row's tests.

Each test has its own confined process. The program is the last block tagged Python (the last that defines what is
tested), else the last untagged block, else the whole response if it has no block. docs/rewards.md lists the tolerances.
"""

from __future__ import annotations

import logging
import re
import secrets
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock

from rlhfless.records import Prompt
from rlhfless.records.fields import MissingField, field_value, find_field
from rlhfless.rewards.code_checks import COUNTER, EQUAL, read_test_code
from rlhfless.rewards.code_tests import CallTest, CodeTest, OutputTest, Test, entry_point, same_output, tests_of
from rlhfless.rewards.confinement import CLEAN_UP_S, CodeTask, run_confined
from rlhfless.rewards.protocol import (
    Begin,
    Done,
    Failed,
    RewardSample,
    Unscorable,
    described,
    listed,
    quote,
    unscorable,
)
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
        if faults := unscorable(prompts, lambda prompt: tests_of(prompt.columns, self._spec)):
            return [listed("the tests cannot be used", faults, len(prompts))]
        if self._spec.solution_field is None:
            return []
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
            names.add(_bare(test.function))
        if isinstance(test, CodeTest):
            names.update(read_test_code(test.source).uses)
    return names - {""}


def _bare(function: str) -> str:
    """Return the last name of `Solution().solve`."""
    return function.replace("()", "").rpartition(".")[2]


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


# -- completing stubs


_CODE = re.compile(r"^[ \t]*(?:import |from \S+ import |def |async def |class )", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import [^(\n]*\n", re.MULTILINE)


def programs_of(program: str, function: str, stub: str) -> tuple[str, ...]:
    """Complete a program with its prompt's stub, as in HumanEval; the first candidate that compiles is run.

    A program that defines the function gets the stub's imports and helpers; any other is taken as the function's body.
    """
    program = textwrap.dedent(program).strip("\n")
    name = _bare(function)
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


# -- finding the program, or the JSON, in a response: CommonMark fenced blocks with a few tolerances (docs/rewards.md)


_OPENING = re.compile(r"(?P<fence>`{3,})(?P<info>[^`]*)|(?P<tildes>~{3,})(?P<more>.*)")
# A fence after text on its line is no fence in CommonMark, but models write `Solution: ```python`.
_GLUED = re.compile(r"(?!>).*?[^`](?P<fence>`{3,})(?P<info>[ \t]*(?:\{?\.?python[\w.]*\}?|py3?))[ \t]*", re.IGNORECASE)
_PYTHON = re.compile(r"\.?(?:(?:lang|language|source)[-:=])?(?:i?python(?P<more>[\w.-]*)|py[ -]?[\d.]*)", re.IGNORECASE)
_SESSIONS = ("repl", "console", "session", "traceback")
_NO_LANGUAGE = frozenset({"", "code"})

# Around programs without a fence in the prompts of MBPP and Code Llama.
_MARKS = re.compile(r"^\[(?:BEGIN|PYTHON)\][ \t]*\n(.*?)(?:^\[(?:DONE|/PYTHON)\]|\Z)", re.DOTALL | re.MULTILINE)

_TRIPLE = r"""(?P<quotes>\"{3}|'{3})(?:\\.|[^\\])*?(?P=quotes)"""
# What a program consists of, as far as it matters for where it ends: backticks stand in strings and comments only.
_LEXEMES = re.compile(
    rf"""{_TRIPLE}
    | (?P<unclosed>\"{{3}}|'{{3}})
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | \#[^\n]*
    | (?P<fence>`{{3,}} | (?<=\n)[ \t>]*~{{3,}})
    | (?P<mark>(?<=\n)[ \t]*</(?:think|answer)>)""",
    re.DOTALL | re.VERBOSE,
)
_TEXT_LEXEMES = re.compile(
    rf"""{_TRIPLE} | (?P<fence>^[ \t>]*(?:[-*+] | \d{{1,9}}[.)])?[ \t]*(?:`{{3,}} | ~{{3,}}) | `{{3,}}[ \t{{.]*py)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a response."""

    tag: str
    """`python`, `session` for an interactive session, empty without a language, else the language."""
    source: str
    """The content, without the fence's indentation."""
    first: int
    """Line of the opening fence, from 0."""
    end: int
    """Line after the last one."""


def program_of(response: str, names: Collection[str] = ()) -> str | None:
    """Return the response's Python program, or None. `names`: names that the tests use."""
    blocks, text = _answer(response)
    if not blocks:
        text = next((match[1] for match in _MARKS.finditer(text)), text)
        return text if text.strip() else None
    last = _last(blocks, "python", "")
    tag = "python" if any(block.tag == "python" and block.source.strip() for block in blocks) else ""
    defines = definition_of(*names)
    return _last([block for block in blocks if names and defines.search(block.source)], tag) or last


def definition_of(*names: str) -> re.Pattern[str]:
    """Match a line that defines one of the names: a function or class anywhere, or a module variable."""
    any_of = f"(?:{'|'.join(map(re.escape, names))})"
    function = rf"[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{any_of}\b"
    return re.compile(rf"^(?:{function}|{any_of}[ \t]*(?::[^=\n]*)?=(?!=))", re.MULTILINE)


def json_blocks_of(response: str) -> list[str]:
    """Return blocks that may hold the response's JSON, best first."""
    blocks, _ = _answer(response)
    found = [_last(blocks, *tags) for tags in (("json", "jsonc", "json5"), ("",))]
    return [source for source in found if source is not None]


def _last(blocks: Sequence[Block], *tags: str) -> str | None:
    """Return the last non-empty block with the first tag that any block has."""
    for tag in tags:
        sources = [block.source for block in blocks if block.tag == tag and block.source.strip()]
        if sources:
            return sources[-1]
    return None


def _answer(response: str) -> tuple[list[Block], str]:
    """Return the blocks and the text of the final answer."""
    text = response.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    blocks = blocks_of(text)
    inside = {line for block in blocks for line in range(block.first + 1, block.end)}
    lines = text.split("\n")
    start, end = _bounds_of_answer(lines, inside)
    return [block for block in blocks if start <= block.first < end], _after_marks("\n".join(lines[start:]))


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a text whose lines end in `\\n`."""
    if not any(match["fence"] for match in _TEXT_LEXEMES.finditer(text)):
        return []  # no fence, or only in the strings of a program without one
    blocks = []
    for token in _markdown().parse(text):
        if token.type == "fence":
            assert token.map is not None
            source = textwrap.dedent(token.content)
            tag = "session" if source.lstrip().startswith(">>>") else _tag(token.info)
            line, _, rest = source.partition("\n")
            if not tag and _is_python(line.strip()):  # the tag is on a line of its own
                tag, source = "python", rest
            blocks.append(Block(tag, source, *token.map))
    return blocks


@lru_cache(maxsize=1)
def _markdown() -> MarkdownIt:
    """CommonMark without indented code and HTML, which would hide fences below `<answer>`."""
    markdown = MarkdownIt("commonmark", {"maxNesting": 100}).disable(["code", "html_block", "reference", "inline"])
    markdown.block.ruler.at("fence", _fence, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    return markdown


def _fence(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """markdown-it rule: parse a fenced block at this line."""
    line = state.src[state.bMarks[first] + state.tShift[first] : state.eMarks[first]]
    opened = _OPENING.fullmatch(line) or _GLUED.fullmatch(line)
    if opened is None:
        return False
    if silent:
        return True
    groups = opened.groupdict()
    fence, info = groups["fence"] or groups["tildes"], groups["info"] or groups.get("more") or ""
    last, rest, closed = _end(state, first, end, fence, _tag(info))
    token = state.push("fence", "code", 0)
    token.info = info
    token.content = state.getLines(first + 1, last, state.sCount[first], True) + rest
    state.line = last + closed
    token.map = [first, state.line]
    return True


def _end(state: StateBlock, first: int, end: int, fence: str, tag: str) -> tuple[int, str, bool]:
    """Return the line where a block ends, text that belongs to it before the closing fence, and whether to skip the
    line."""
    found = _end_of_program(state, first, end, fence) if tag in ("python", "") else None
    if found is not None:
        return found
    for number in range(first + 1, end):
        line = state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]
        bare = line.strip(" \t")
        if len(bare) >= len(fence) and set(bare) == {fence[0]}:
            return number, "", True
        if line.startswith(("</think>", "</answer>")):
            return number, "", False
        if line.startswith(fence) and (opened := _OPENING.fullmatch(line)) and _tag(opened["info"] or "") == "python":
            return number, "", False  # the fence before was never closed
    return end, "", False


def _end_of_program(state: StateBlock, first: int, end: int, fence: str) -> tuple[int, str, bool] | None:
    """Like `_end`, by the first fence outside strings and comments; None if a string is not closed."""
    stop = state.eMarks[end - 1]
    for match in _LEXEMES.finditer(state.src, state.eMarks[first], stop):
        if match["unclosed"]:
            return None
        found = (match["fence"] or "").lstrip(" \t>")
        if not found.startswith(fence) and not match["mark"]:
            continue
        number = _line_at(state, match.end(), first, end)
        if match["mark"]:
            return number, "", False
        begin = state.bMarks[number] + state.tShift[number]
        before = state.src[begin : match.end() - len(found)]
        after = state.src[match.end() : state.eMarks[number]].strip()
        if not before.strip(" \t>"):
            return number, "", not after
        indentation = " " * max(0, state.sCount[number] - state.sCount[first])
        return number, indentation + before + "\n", True
    return end, "", False  # the response was cut off


def _line_at(state: StateBlock, offset: int, first: int, end: int) -> int:
    low, high = first, end - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if state.eMarks[middle] >= offset else (middle + 1, high)
    return low


def _tag(info: str) -> str:
    """Return `python`, empty, or the language of an info string such as `{.python .numberLines}`."""
    braces = re.match(r"\s*\{([^}]*)\}?(.*)", info)
    if braces:
        words = [*re.split(r"[\s,]+", braces[1]), *braces[2].split()[:1]]
        return "python" if any(map(_is_python, words)) else words[0].lstrip(".").lower() or "other"
    word = (re.split(r"[\s,;:{(\[=]", info.strip(), maxsplit=1) or [""])[0]
    if _is_python(word) or word.lower().endswith(".py"):
        return "python"
    return "" if word.lower() in _NO_LANGUAGE else word.lower()


def _is_python(word: str) -> bool:
    match = _PYTHON.fullmatch(word)
    return match is not None and not any(session in (match["more"] or "").lower() for session in _SESSIONS)


def _bounds_of_answer(lines: Sequence[str], inside: set[int]) -> tuple[int, int]:
    """Return the first line of the final answer and the line after it. `inside`: lines of blocks, which are skipped."""
    outside = [number for number in range(len(lines)) if number not in inside]
    thought = max((number for number in outside if "</think>" in lines[number]), default=0)
    answers = [number for number in outside if number >= thought and lines[number].lstrip().startswith("<answer>")]
    if not answers:
        return thought, len(lines)
    ends = (number for number in outside if number > answers[-1] and "</answer>" in lines[number])
    return answers[-1], next(ends, len(lines))


def _after_marks(text: str) -> str:
    text = text.rpartition("</think>")[2]
    marked = re.match(r"\s*<answer>(.*?)(?:</answer>|\Z)", text, re.DOTALL)
    return marked[1] if marked else text
