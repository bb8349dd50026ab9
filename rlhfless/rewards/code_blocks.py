"""Find the Python program, or the JSON, in a response: CommonMark fenced blocks with a few tolerances.

The program is the last block tagged Python (the last that defines what is tested), else the last untagged block, else
the whole response if it has no block. docs/rewards.md lists the tolerances.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock

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
