"""Whether a program's output is the expected one, as judges of programming contests compare it."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_NUMBER = re.compile(r"(?<![\w.])([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?!\w|\.\w)", re.ASCII)
"""A number that is not a part of a word."""


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Compare line by line, without white space at the ends of lines and of the whole.

    Where the expected line has a decimal number, such as `0.5` or `1e-3`, also within `(0.5, 1)` or `x=0.5`, the
    program's number may differ from it by `tolerance`, absolute or relative. A whole number may be written otherwise
    (`2.0` for `2`), as LiveCodeBench's judge has it; all else must be the same.
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
