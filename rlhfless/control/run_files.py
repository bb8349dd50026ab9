"""What the service reads of a run's folder."""

from __future__ import annotations

from pathlib import Path

from rlhfless.records.run_folder import TRACE_FOLDER


def trace_of(run_folder: str) -> str | None:
    """The folder of the run's trace; None before its first step."""
    folder = Path(run_folder) / TRACE_FOLDER
    return str(folder) if (folder / "meta.json").exists() else None
