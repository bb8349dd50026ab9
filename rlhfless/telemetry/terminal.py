"""Output for people: lines stay whole in pipes and files, and paths stay whole everywhere."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from rlhfless.util.text import legible

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
