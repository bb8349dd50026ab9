"""Where the final answer of a response is: the last box, the last `<answer>`, or what it says last.

A response that corrects itself, `\\boxed{3}. Wait ... \\boxed{4}`, means its last box. Boxes with nothing but commas,
`and` or `or` between them are one answer with several parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_TAG, _TAG_ENDS = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s${}\\]+")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# What may stand between the boxes of one answer, besides the words and signs that `_JOINS` finds.
_BETWEEN = re.compile(
    r"(?:[\s$,;&.()\[\]{}]|\\(?:text|mbox|quad|qquad|[\\,;:! ()\[\]])|\b(?:and|or)\b|=|[A-Za-z]\s*=)*"
)
_JOINS = re.compile(r"[,;&]|\b(?:and|or)\b")
_THOUGHT_ENDS = "</think>"
# What stands before an answer: `the answer is`, `Answer:`, the mark of GSM8K.
_STATED = re.compile(r"(?i:answer)(?:\s+(?:is|are|equals|would be|=)|\*{0,2}\s*[:=])\*{0,2}:?[ \t]*\n?|####[ \t]*")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The text of an answer, in a box or stated."""

    text: str
    boxed: bool
    joined: str = ""
    """Of several boxes that only line breaks separate: all of them as one answer; else empty."""


def final_part(response: str) -> str:
    """What the response says after its thoughts, and within its last `<answer>` if there is one."""
    said = response.rpartition(_THOUGHT_ENDS)[2]
    before, ended, _ = said.rpartition(_TAG_ENDS)
    _, opened, tagged = before.rpartition(_TAG)
    return tagged if ended and opened else said


def boxed_answer(text: str) -> FinalAnswer | None:
    """The last box that is not empty, with those before it that are of the same answer; None without a box. A box that
    never closes is an answer that was cut off, and empty."""
    boxes = [box for box in _boxes(text) if box[2].strip()]
    if not boxes:
        return None
    if boxes[-1][1] < 0:
        return FinalAnswer("", boxed=True)
    group = [boxes[-1]]
    explicit = False
    for box in reversed(boxes[:-1]):
        between = text[box[1] : group[0][0]]
        if not _BETWEEN.fullmatch(between):
            break
        joins = bool(_JOINS.search(between))
        if len(group) > 1 and joins != explicit:
            break
        explicit = joins
        group.insert(0, box)
    parts = list(dict.fromkeys(box[2].strip() for box in group))
    together = ", ".join(parts) if len(parts) > 1 else ""
    if together and explicit:
        return FinalAnswer(together, boxed=True)
    return FinalAnswer(group[-1][2].strip(), boxed=True, joined=together)


def stated_answers(text: str) -> Iterator[str]:
    """Texts that may be the whole answer of a response without a box, the most likely first."""
    if stated := list(_STATED.finditer(text)):
        line = text[stated[-1].end() :].partition("\n")[0].strip()
        if line.count("**") % 2:  # opened before the answer
            line = line.removesuffix("**")
        yield line
        if end := _SENTENCE_END.search(line):
            yield line[: end.start()]
    if "\n" not in text.strip():
        yield text.strip()


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each box without another in it. The end is -1 if the box does not close."""
    closings = _closings(text)
    for opening, following in pairwise([*_BOX.finditer(text), None]):
        assert opening is not None
        first = opening.end()
        if text[first : first + 1] == "{":
            end = closings.get(first, -1)
            if end < 0:
                yield opening.start(), -1, text[first:]
                return
            if following is None or following.start() > end:
                yield opening.start(), end + 1, text[first + 1 : end]
        elif bare := _BARE.match(text, first):
            yield opening.start(), bare.end(), bare[0].rstrip(".,;")


def _closings(text: str) -> dict[int, int]:
    """Where each brace closes, by where it opens."""
    opened, closings = [], {}
    for found in _BRACES.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closings[opened.pop()] = found.start()
    return closings
