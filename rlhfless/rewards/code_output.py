"""Whether a program's output is the expected one, as judges of programming contests compare it."""

from __future__ import annotations

import math
import re

_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
"""A number that is written with a point or an exponent."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Compare line by line, without white space at the ends of lines and of the whole.

    Where a word of the expected line is a decimal number, such as `0.5` or `1e-3`, the program's word may differ from
    it by `tolerance`, absolute or relative; every other word, whole numbers among them, must be the same.
    """
    lines, wanted = _lines(given), _lines(expected)
    if len(lines) != len(wanted):
        return False
    return all(a == b or (tolerance > 0 and _close_words(a, b, tolerance)) for a, b in zip(lines, wanted, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _close_words(given: str, expected: str, tolerance: float) -> bool:
    words, wanted = given.split(), expected.split()
    return len(words) == len(wanted) and all(
        a == b or _close(a, b, tolerance) for a, b in zip(words, wanted, strict=True)
    )


def _close(given: str, expected: str, tolerance: float) -> bool:
    if not _DECIMAL.fullmatch(expected) or not _NUMBER.fullmatch(given):
        return False
    a, b = float(given), float(expected)
    return math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))
