"""A part of a page of docs/ that a script writes, between two markers."""

from __future__ import annotations

import sys
from pathlib import Path


def write_part(page: Path, begin: str, end: str, part: str) -> int:
    """Write the part; with `--check` on the command line only say whether it is up to date (1 if not)."""
    text = page.read_text()
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    new = f"{head}{begin}\n\n{part}\n{end}{tail}"
    if "--check" in sys.argv[1:]:
        return int(new != text)
    page.write_text(new)
    return 0
