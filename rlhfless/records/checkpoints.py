"""The checkpoints of a run: which exist, which one to resume from, and which to keep.

    checkpoints/step-000020/   a Hugging Face model folder, the learner's state, and run.json

The learner writes a temporary folder and renames it, so a folder with the right name is complete. run.json names the
run, step and weights of the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfless.spec.errors import UserError

NOTES_FILE = "run.json"

CHECKPOINT_VERSION = 1

_PREFIX = "step-"


class CheckpointError(UserError):
    """A checkpoint cannot be written or read. The message names the folder."""


@dataclass(frozen=True, slots=True)
class CheckpointNotes:
    """The contents of run.json: the identity of a checkpoint."""

    run_id: str
    attempt: int
    step: int
    """Training steps that its weights have taken; the data position and all seeds follow from it."""
    digest: str
    """Digest of the weights that were published after that step."""
    score: float | None
    """The score that decides which checkpoint is the best; None if it was not measured yet."""
    before: Mapping[str, float]
    """Held-out figures before the first step of the run."""
    version: int = CHECKPOINT_VERSION

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    notes: CheckpointNotes


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self._folder = folder
        self._keep_last = keep_last

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self._folder / f"{_PREFIX}{step:06d}"

    def all(self) -> list[Checkpoint]:
        """The complete checkpoints, by step. Raises CheckpointError for a checkpoint of another format version."""
        return [Checkpoint(path, read_notes(path)) for path in sorted(self._folder.glob(f"{_PREFIX}*"))]

    def newest(self) -> Checkpoint | None:
        """The checkpoint to resume from; None if there is none."""
        return next(reversed(self.all()), None)

    def prune(self) -> list[Path]:
        """Delete all checkpoints except the last few and the best; returns the deleted folders."""
        found = self.all()
        keep = kept([checkpoint.notes for checkpoint in found], self._keep_last)
        gone = [checkpoint.folder for checkpoint in found if checkpoint.notes.step not in keep]
        for folder in gone:
            # Renamed first: an interrupted deletion must not leave half a checkpoint under the name of a whole one.
            dying = folder.with_name(f".{folder.name}.deleted")
            os.replace(folder, dying)
            shutil.rmtree(dying, ignore_errors=True)
        return gone


def kept(notes: Sequence[CheckpointNotes], keep_last: int) -> set[int]:
    """The steps to keep: the last `keep_last`, and the best by score; among equal scores the later."""
    if not notes:
        return set()
    steps = sorted(note.step for note in notes)
    best = max(notes, key=lambda note: (-math.inf if note.score is None else note.score, note.step))
    return {*steps[-keep_last:], best.step}


def read_notes(folder: Path) -> CheckpointNotes:
    """The notes of a checkpoint. Raises CheckpointError if the folder is not a checkpoint, or has another version."""
    file = folder / NOTES_FILE
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of a run: {file.name}: {error}") from error
    version = content.get("version")
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(f"{folder} has version {version}, and this rlhfless knows {CHECKPOINT_VERSION}")
    return CheckpointNotes(**content)
