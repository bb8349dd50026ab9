"""Text from outside, escaped so that every store keeps it and every log and terminal shows it.

A Python text may contain characters that UTF-8 cannot encode: a lone surrogate, as in a file name that is not UTF-8, or
in JSON escapes that were cut off. Parquet, SQLite and a UTF-8 file refuse it, so one such character in a reward's error
would end a run. It is written as its escape (`\\udcff`), where the text enters: rewards' errors, responses, columns,
faults of replicas. Where the text itself must not change (a path, a prompt that is tokenised), it is refused there
instead.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any, TextIO

# NUL ends a text for SQLite's own functions and for every reader written in C.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# All control characters but tab and line feed: ESC would let a text from outside write anywhere on a terminal.
_ILLEGIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def storable(text: str) -> str:
    """The text with lone surrogates and NUL as escapes, `\\udcff` and `\\x00`; any other text as it is."""
    return _UNSTORABLE.sub(_escape, text)


def storable_values(value: Any) -> Any:
    """`storable` for all texts in lists, tuples and mappings, keys included; other values as they are."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable_values(key): storable_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(storable_values, value))
    return value


def legible(text: str) -> str:
    """`storable`, and control characters but tab and line feed as escapes: for messages, logs and terminals."""
    return _ILLEGIBLE.sub(_escape, text)


class WrittenFloat(float):
    """A number with the text that the data has for it: `1.50` is the float 1.5, and as a text `1.50`."""

    text: str

    def __new__(cls, value: Any, text: str | None = None) -> WrittenFloat:
        number = super().__new__(cls, value)
        number.text = str(value) if text is None else text
        return number

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.text)


def parsed_json(text: str | bytes, *, as_written: bool = False) -> Any:
    """JSON from outside; `as_written` keeps the text of numbers. Raises ValueError with one line on whatever is wrong
    with it.

    Beside bad syntax: bytes that are no text, more levels than Python's stack, numbers of more than 4,300 digits.
    """
    try:
        return json.loads(text, parse_float=WrittenFloat if as_written else None)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if "\n" in error.doc.strip() else f"column {error.colno}"
        raise ValueError(f"{error.msg} at {place}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def tolerant(stream: TextIO) -> TextIO:
    """The stream, which from now on writes characters that its encoding lacks as escapes, instead of raising."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
