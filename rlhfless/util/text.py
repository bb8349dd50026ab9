"""Escapes external text so that every store accepts it and every log and terminal shows it.

A Python string may contain characters that UTF-8 cannot encode: a lone surrogate, as in a file name that is not UTF-8,
or in truncated JSON escapes. Parquet, SQLite and UTF-8 files refuse it, so one such character in a reward's error would
end a run. It is replaced by its escape (`\\udcff`) where the text enters: rewards' errors, responses, columns, faults
of replicas. Where the text itself must not change (a path, a prompt to be tokenised), it is refused instead.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any, TextIO

# NUL ends a text for SQLite's own functions and for every reader written in C.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# All control characters but tab and line feed: ESC would let external text write anywhere on a terminal.
_ILLEGIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def storable(text: str) -> str:
    """Return the text with lone surrogates and NUL escaped, as `\\udcff` and `\\x00`; other characters are
    unchanged."""
    return _UNSTORABLE.sub(_escape, text)


def storable_values(value: Any) -> Any:
    """Apply `storable` to all strings in lists, tuples and mappings, including keys; other values are unchanged."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable_values(key): storable_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(storable_values, value))
    return value


def legible(text: str) -> str:
    """Apply `storable`, and escape control characters but tab and line feed, for messages, logs and terminals."""
    return _ILLEGIBLE.sub(_escape, text)


class WrittenFloat(float):
    """A float with its text in the data: `1.50` is the float 1.5, and `1.50` as a string."""

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
    """Parse external JSON. `as_written` keeps the text of numbers. Raises ValueError with a one-line message for any
    fault.

    Covers, besides bad syntax, bytes that are not text, more levels than Python's stack, and numbers of over 4,300
    digits.
    """
    try:
        return json.loads(text, parse_float=WrittenFloat if as_written else None)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if "\n" in error.doc.strip() else f"column {error.colno}"
        raise ValueError(f"{error.msg} at {place}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def tolerant(stream: TextIO) -> TextIO:
    """Make the stream escape characters that its encoding lacks instead of raising, and return it."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
