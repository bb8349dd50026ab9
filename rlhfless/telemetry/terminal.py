"""Output for people: whole lines in pipes and files, whole paths everywhere, and formatted numbers."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from rlhfless.util.text import legible

log = logging.getLogger(__name__)

UNBROKEN_COLUMNS = 10_000
"""Width of a stream that is not a terminal. rich assumes 80 columns there, and would break or crop lines."""


class Terminal(Console):
    """A rich console that never crops: long lines overflow. Its width is unlimited unless it is a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, **options})
        if not self.is_terminal:
            self.width = UNBROKEN_COLUMNS

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich, without cropping."""
        super().print(*objects, **{"crop": False, **options})


_QUOTED_PATH = re.compile(r"'[^'\n]*/[^'\n]*'")
_NO_BREAK = "\xa0"
"""Not white space to textwrap: stands for the spaces of a path while text is wrapped."""


class Prose:
    """Text that wraps between words at the terminal's width. A word or a quoted path is never broken."""

    def __init__(self, text: str, style: str = "") -> None:
        kept = _QUOTED_PATH.sub(lambda path: path[0].replace(" ", _NO_BREAK), legible(text))
        self._lines, self._style = kept.splitlines(), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrap = textwrap.TextWrapper(options.max_width, break_long_words=False, break_on_hyphens=False)
        for line in self._lines:
            yield whole(wrap.fill(line).replace(_NO_BREAK, " "), self._style)


def whole(text: str, style: str = "") -> Group:
    """Return text to print unchanged at any width. A group, because rich joins texts and then loses `no_wrap`."""
    return Group(Text(text, style, no_wrap=True, overflow="ignore"))


class LastingStream:
    """Writes to a stream until its reader is gone (`| head`, a closed terminal), then discards output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.closed_by_reader = False

    def write(self, text: str) -> int:
        if not self.closed_by_reader:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                self._leave(error)
        return len(text)

    def flush(self) -> None:
        if not self.closed_by_reader:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        self.closed_by_reader = True
        log.info("the output is closed (%s); from here on progress is only logged", error)
        with suppress(OSError, ValueError):  # the interpreter flushes buffered output again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- numbers; an unmeasured value (None) is a dash


_DASH = "-"


def count(value: float | None) -> str:
    """Format a count: `1,234`."""
    return _DASH if value is None else f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a decimal: `0.412`. Values that round to zero have no sign."""
    return _DASH if value is None else f"{value:z,.{digits}f}"


def parameter_count(parameters: float) -> str:
    """Format a number of parameters: `0.5 M`, `33.4 M`, `0.494 B`."""
    unit, name = (1e9, "B") if parameters >= 1e8 else (1e6, "M")
    return f"{parameters / unit:.3g} {name}"


def money(usd: float | None) -> str:
    """Format US dollars, to the cent from $1 up and to four digits below: small runs cost little."""
    if usd is None:
        return _DASH
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def clock(seconds: float) -> str:
    """Format a duration: `31 s`, `4:31`, `1:12:05`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{whole} s"
