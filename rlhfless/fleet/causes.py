"""Why a replica did not start, from what Serve says of it: a text with the tracebacks of all processes in between."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from rlhfless.spec.errors import UserError

_OURS = "rlhfless."

# The line of a traceback that names the exception: at the left margin, a class with its module, or a built-in one.
_EXCEPTION = re.compile(
    r"^(?P<name>(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?:: |$)", re.MULTILINE
)


class StartRefused(UserError):
    """A replica could not start for a reason that the user can mend. The text is what the replica said."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The innermost exception of a failed start."""

    name: str
    """Of its class, with the module; empty if Serve names none."""
    message: str

    @property
    def is_users(self) -> bool:
        """The user can mend it."""
        if not self.name.startswith(_OURS):
            return False
        module, _, name = self.name.rpartition(".")
        try:
            found = getattr(import_module(module), name, None)
        except ImportError:
            return False
        return isinstance(found, type) and issubclass(found, UserError)

    def __str__(self) -> str:
        return f"{self.name.rpartition('.')[2]}: {self.message}" if self.name else self.message


def innermost(texts: Sequence[str]) -> Cause:
    """The last exception that is named: Serve's texts end with the cause, and its message may have many lines."""
    for text in reversed(texts):
        named = list(_EXCEPTION.finditer(text))
        if named:
            return Cause(named[-1]["name"], text[named[-1].end() :].strip())
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return Cause("", lines[-1] if lines else "no reason given")
