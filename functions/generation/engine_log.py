"""The log of an actor's engine, one file per replica, and the errors of a failed start in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhfless.util.folders import home
from rlhfless.util.text import tail

FOLDER = "engines"

READ_LINES = 1000
"""Last lines of a log to read: each engine process writes a trace of some fifty lines, and the processes that wait
for it write theirs afterwards."""

LAST_LINES = 12
"""Last lines to show: they contain the cause if a process died without a trace."""

MOST_ERRORS = 6

_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]+\] )?")
"""Prefix of vLLM's lines: the process, and for log records the level, time and place."""

_ERROR = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")


def log_file(run_folder: str, run_id: str, replica: str) -> Path:
    """Return `replica`'s file in the run's folder if this machine has it, else in this user's own folder here.

    Creates the folder. A driver that resumes the run reuses names, so its engines append to the same files.
    """
    run = Path(run_folder)
    folder = run / FOLDER if run.is_dir() and os.access(run, os.W_OK) else home() / "logs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{replica.removeprefix(f'{run_id}-')}.log"


def errors_and_end(log: Path, explained: str) -> str:
    """Return the errors in the log of a failed start, and its last lines, without lines in `explained`.

    The first error comes first: it causes the others. Lines are indented, so that none is mistaken for the fault's
    own.
    """
    lines = [line for line in tail(log, READ_LINES).splitlines() if line.strip() not in explained]
    named = dict.fromkeys(text for line in lines if _ERROR.match(text := _PREFIX.sub("", line)))
    shown = [f"errors in the engine's log, {log}:", *map(_indented, list(named)[:MOST_ERRORS])] if named else []
    last = [f"the engine's log, {log}, ends with:", *map(_indented, lines[-LAST_LINES:])] if lines else []
    return "\n".join([*shown, *last])


def _indented(line: str) -> str:
    return f"    {line}"
