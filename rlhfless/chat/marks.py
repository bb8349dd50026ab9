"""Find the texts of messages in a rendering, by a mark in the middle of each text.

A template may change what it writes, so the marked rendering is compared with an unmarked twin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhfless.chat.messages import Message

_MARK = re.compile("\ue000([0-9]+)\ue001|\\\\ue000([0-9]+)\\\\ue001")


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a message, and its position in a rendering."""

    message: int
    what: str
    text: str
    end: int | None
    """Position after it in the rendering; None if it is missing."""


def named_texts(message: Message) -> list[tuple[str, str]]:
    """Return the texts of a message, each with its name."""
    found: list[tuple[str, str]] = []

    def note(what: str, text: str) -> str:
        found.append((what, text))
        return text

    message.mapped(note)
    return found


def _halves(text: str) -> tuple[str, str]:
    """Split a text in two non-blank halves (if it has two characters), if possible not within an escape or tag."""
    core = text.strip()
    start = text.index(core)
    middle = start + len(core) // 2
    for at in (*range(middle, start, -1), *range(middle + 1, start + len(core))):
        if text[at - 1].isalnum() and text[at : at + 1].isalnum():
            return text[:at], text[at:]
    return text[:middle], text[middle:]


def marked_messages(messages: Sequence[Message]) -> list[Message]:
    """Put a numbered mark in the middle of each text."""
    number = 0

    def mark(_: str, text: str) -> str:
        nonlocal number
        before, after = _halves(text)
        marked = f"{before}\ue000{number}\ue001{after}"
        number += 1
        return marked

    return [message.mapped(mark) for message in messages]


def located_texts(plain: Sequence[tuple[int, str, str]], text: str, marked: str) -> Iterator[Text]:
    """Find the end of each text in the rendering `text`, by the marks in its `marked` twin."""
    places: dict[int, list[int]] = {}
    length = at = 0
    for mark in _MARK.finditer(marked):
        length += mark.start() - at
        at = mark.end()
        places.setdefault(int(mark[1] or mark[2]), []).append(length)
    same = _MARK.sub("", marked) == text and bool(places)
    searched = 0
    for number, (message, what, part) in enumerate(plain):
        if same:
            ends = (_end_at(part, text, place) for place in places.get(number, ()))
            end = next((end for end in ends if end is not None), None)
        else:  # the template reads what the texts say, so marks may have changed what it writes
            end = _end_after(part, text, searched) or _end_after(part, text, 0)
            end = end if number in places or marked == text else None
            searched = max(searched, end or 0)
        yield Text(message, what, part, end)


def _end_at(part: str, text: str, place: int) -> int | None:
    """Return the end of a text whose middle is at `place`, if it is there verbatim or JSON-escaped."""
    before, after = _halves(part)
    if not any(text[max(place - len(form), 0) : place] == form for form in _written(before.lstrip())):
        return None
    return next((place + len(form) for form in _written(after.rstrip()) if text.startswith(form, place)), None)


def _end_after(part: str, text: str, start: int) -> int | None:
    found = ((text.find(form, start), len(form)) for form in _written(part.strip()))
    return next((at + length for at, length in found if at >= 0), None)


def _written(text: str) -> tuple[str, ...]:
    """Return a text verbatim and JSON-escaped."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
