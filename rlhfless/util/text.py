"""Escapes external text so that every store accepts it and every log and terminal shows it, and redacts secrets.

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
from pathlib import Path
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


MOST_BYTES = 512 << 10
"""Maximum bytes read from a file: a few thousand lines."""


def tail(file: Path, lines: int) -> str:
    """Return the last lines of a file, with control characters escaped; empty if the file does not exist."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            start = max(size - MOST_BYTES, 0)
            stream.seek(start)
            content = stream.read(MOST_BYTES)
    except OSError:
        return ""
    text = legible(content.decode("utf-8", "replace").replace("\r\n", "\n"))
    complete = text.splitlines()
    if start:
        complete = complete[1:]  # the first line is incomplete
    return "".join(f"{line}\n" for line in complete[-lines:])


# -- secrets: values of keys with secret names, and passwords in URLs


HIDDEN = "***"

_SECRET_KEY = re.compile(r"(?i)(^|_|-)(token|secret|password|passwd|api_?key|authorization|credentials?)s?$")
_USER_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"]+@")
_SECRET_IN_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:token|secret|password|signature|api_?key))=)[^&\s'\"]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_OWN_KEY = re.compile(r"\brlk_[\w-]{8,}")


def redacted(value: Any) -> Any:
    """Return the value with its secrets replaced by ***."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if _is_secret(key, inner) else redacted(inner)
            for key, inner in value.items()
        }  # fmt: skip
    if type(value) in (list, tuple):
        return type(value)(map(redacted, value))
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a text, such as a message or log lines, with its secrets replaced by ***."""
    text = _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _SECRET_IN_QUERY.sub(rf"\1{HIDDEN}", text)
    return _OWN_KEY.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text))


def _is_secret(key: Any, value: Any) -> bool:
    # Counts of tokens are not secrets: max_tokens: 512, micro_batch_tokens: auto.
    return isinstance(key, str) and isinstance(value, str) and value != "auto" and bool(_SECRET_KEY.search(key))


def user_in(url: str) -> bool:
    """Return whether a URL has a user or password before its host."""
    return bool(_USER_IN_URL.match(url))
