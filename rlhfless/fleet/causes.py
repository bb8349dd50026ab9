"""Why a replica did not start, read from the text that Serve reports: the tracebacks of all processes in between."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The line of a traceback that names the exception: at the left margin, a class with its module, or a built-in one.
_EXCEPTION = re.compile(
    r"^(?P<name>(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?:: |$)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Cause:
    """The innermost exception of a failed start."""

    name: str
    """Its class with the module; empty if Serve names none."""
    message: str

    def __str__(self) -> str:
        return f"{self.name.rpartition('.')[2]}: {self.message}" if self.name else self.message


def innermost(texts: Sequence[str]) -> Cause:
    """The last exception named in the texts: Serve puts the cause last, and its message may have many lines."""
    for text in reversed(texts):
        named = list(_EXCEPTION.finditer(text))
        if named:
            return Cause(named[-1]["name"], text[named[-1].end() :].strip())
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return Cause("", lines[-1] if lines else "no reason given")
