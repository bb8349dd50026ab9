"""The end of a log file of any size."""

from __future__ import annotations

from pathlib import Path

from rlhfless.util.text import legible

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
