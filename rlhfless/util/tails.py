"""The end of a log file, whatever its size."""

from __future__ import annotations

from pathlib import Path

from rlhfless.util.text import legible

MOST_BYTES = 512 << 10
"""Read of one file at most: some thousand lines."""


def tail(file: Path, lines: int) -> str:
    """The last lines of a file, with control characters as escapes; empty if there is no such file."""
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
        complete = complete[1:]  # the first one is cut
    return "".join(f"{line}\n" for line in complete[-lines:])
