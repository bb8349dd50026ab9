"""A run's folder as the service reads it, and the check that driver and service share it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rlhfless.records.ledger import TRACE_FOLDER
from rlhfless.util.folders import replace_text

FIND_S = 5.0
"""Maximum wait until a file written on one machine is visible on another. Network file systems cache folder contents
for a few seconds."""

CHECK_S = 0.25


ALLOWED_FILE = "allow-changed.json"
"""File with the kinds of inputs that a user has allowed to change, until the run's next driver accepts them."""


def allow_changed(folder: Path, kinds: Sequence[str]) -> None:
    """Record which inputs may have changed when the run is resumed. A run without a folder has not read any yet."""
    if folder.is_dir():
        replace_text(folder / ALLOWED_FILE, json.dumps(kinds))


def allowed_in(folder: Path) -> frozenset[str]:
    """Return the recorded kinds. The driver removes the file once it has accepted the changes."""
    try:
        return frozenset(map(str, json.loads((folder / ALLOWED_FILE).read_text("utf-8"))))
    except (OSError, ValueError, TypeError):
        return frozenset()


def trace_of(run_folder: str) -> str | None:
    """Return the folder of the run's trace; None before its first step."""
    folder = Path(run_folder) / TRACE_FOLDER
    return str(folder) if (folder / "meta.json").exists() else None


def leave_mark(folder: Path, attempt: int, text: str) -> None:
    """Write a driver's mark, which the service looks for. Raises OSError if the folder is not writable."""
    replace_text(_mark(folder, attempt), text)


def finds_mark(folder: Path, attempt: int, text: str, wait_s: float = FIND_S) -> bool:
    """Return whether the driver's mark is in this folder, and remove it."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            if _mark(folder, attempt).read_text("utf-8") == text:
                _mark(folder, attempt).unlink(missing_ok=True)
                return True
        except OSError:
            pass  # it is not visible yet
        if time.monotonic() > end_s:
            return False
        time.sleep(CHECK_S)


def _mark(folder: Path, attempt: int) -> Path:
    """Return the path of an attempt's mark. Names differ by attempt, because a file system may cache that a name did
    not exist."""
    return folder / f"driver-{attempt}.mark"


def not_shared(folder: Path, what: str) -> str:
    """Return the message, with a hint, for a run whose folder is not shared. `what`: the side that is missing files."""
    return (
        f"the folder of the run, {folder}, must be one folder for the service and the Ray cluster, because journal, "
        f"outbox and checkpoints outlive both: {what}. The service's operator mounts one volume at "
        f"{folder.parent} on both sides, writable by both (the chart: the claim of "
        "volumes.runs, whose accessMode must be ReadWriteMany where the pods are on several nodes)"
    )
