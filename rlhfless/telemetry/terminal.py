"""Output for people: lines stay whole in pipes and files, and a path stays whole everywhere."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rlhfless.text import legible

UNBROKEN_COLUMNS = 10_000
"""Width of a stream that is no terminal: rich assumes 80 columns there, and would break or cut lines."""


class Terminal(Console):
    """A rich console without a width where there is no terminal. It never crops: what is too wide runs on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, **options})
        if not self.is_terminal:
            self.width = UNBROKEN_COLUMNS

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, without cropping."""
        super().print(*objects, **{"crop": False, **options})


class Prose:
    """Text that wraps between words at the width of a terminal. A word, such as a path, is never broken."""

    def __init__(self, text: str, style: str = "") -> None:
        self._lines, self._style = legible(text).splitlines(), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrap = textwrap.TextWrapper(options.max_width, break_long_words=False, break_on_hyphens=False)
        for line in self._lines:
            yield whole(wrap.fill(line), self._style)


def whole(text: str, style: str = "") -> Text:
    """Text that is printed as it is, whatever the width."""
    return Text(text, style, no_wrap=True, overflow="ignore")
