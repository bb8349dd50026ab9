"""Where the final answer of a response is: the last box, the last `<answer>`, or what it says last.

A response that corrects itself, `\\boxed{3}. Wait ... \\boxed{4}`, means its last box. Boxes with nothing but commas,
`and` or `or` between them are one answer with several parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# What may stand between the boxes of one answer, besides the words and signs that `_JOINS` finds.
_BETWEEN = re.compile(
    r"(?:[\s$,;&.()\[\]{}]|\\(?:text|mbox|quad|qquad|[\\,;:! ()\[\]])|\b(?:and|or)\b|=|[A-Za-z]\s*=)*"
)
_JOINS = re.compile(r"[,;&]|\b(?:and|or)\b")
_THOUGHT_ENDS = "</think>"
# `the answer is ...`, `Answer: ...` with what follows on that line.
_STATED = re.compile(r"(?i:answer)(?:\s+(?:is|are|equals|would be|=)|\*{0,2}\s*[:=])\*{0,2}:?\s*([^\n]+)")
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
    tagged = _TAGGED.findall(said)
    return tagged[-1] if tagged else said


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
    if "\n" not in text.strip():
        yield text.strip()
    if stated := _STATED.findall(text):
        line = stated[-1].strip()
        yield line
        if end := _SENTENCE_END.search(line):
            yield line[: end.start()]


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each outermost box, and of a box within a box its content. The end is -1 if the box
    does not close."""
    position = 0
    while opening := _BOX.search(text, position):
        position = opening.end()
        if text[position : position + 1] == "{":
            end = _closing(text, position)
            if end is None:
                yield opening.start(), -1, text[position:]
                return
            content = text[position + 1 : end]
            inner = boxed_answer(content)
            yield opening.start(), end + 1, content if inner is None else inner.text
            position = end + 1
        elif bare := re.compile(r"[^\s${}\\]+").match(text, position):
            yield opening.start(), bare.end(), bare[0].rstrip(".,;")
            position = bare.end()


def _closing(text: str, opening: int) -> int | None:
    """Where the brace closes that opens there."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None
