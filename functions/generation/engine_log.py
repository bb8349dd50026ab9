"""The log of an actor's engine, one file for each replica, and the errors of a failed start in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhfless.util.folders import home
from rlhfless.util.tails import tail

FOLDER = "engines"

READ_LINES = 1000
"""The last lines of a log that are read: each process of an engine writes its trace, of some fifty lines, and those
that wait for it write theirs after it."""

LAST_LINES = 12
"""The last lines that are shown: they have the cause of a process that died without a trace."""

MOST_ERRORS = 6

_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]+\] )?")
"""The beginning of vLLM's lines: the process, and for logged lines level, time and place."""

_ERROR = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")


def log_file(run_folder: str, run_id: str, replica: str) -> Path:
    """`replica`'s file in the run's folder, if this machine has that, or else in this user's own folder here. A driver
    that resumes the run uses names again: its engines go on in the same files. The folder is made."""
    run = Path(run_folder)
    folder = run / FOLDER if run.is_dir() and os.access(run, os.W_OK) else home() / "logs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{replica.removeprefix(f'{run_id}-')}.log"


def errors_and_end(log: Path, explained: str) -> str:
    """The errors that the log of a failed start names, the first one first, because the others follow from it; and its
    last lines, without lines that `explained` has. Indented, so that no line is taken for the fault's own."""
    lines = [line for line in tail(log, READ_LINES).splitlines() if line.strip() not in explained]
    named = dict.fromkeys(text for line in lines if _ERROR.match(text := _PREFIX.sub("", line)))
    shown = [f"errors in the engine's log, {log}:", *map(_indented, list(named)[:MOST_ERRORS])] if named else []
    last = [f"the engine's log, {log}, ends with:", *map(_indented, lines[-LAST_LINES:])] if lines else []
    return "\n".join([*shown, *last])


def _indented(line: str) -> str:
    return f"    {line}"
