"""Where the log of an actor's engine is: one file for each replica."""

from __future__ import annotations

import os
from pathlib import Path

from rlhfless.folders import home

FOLDER = "engines"


def log_file(run_folder: str, run_id: str, replica: str) -> Path:
    """`replica`'s file in the run's folder, if this machine has that, or else in this user's own folder here. A driver
    that resumes the run uses names again: its engines go on in the same files. The folder is made."""
    run = Path(run_folder)
    folder = run / FOLDER if run.is_dir() and os.access(run, os.W_OK) else home() / "logs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{replica.removeprefix(f'{run_id}-')}.log"
