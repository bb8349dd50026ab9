"""The checkpoints of a run: which exist, which to resume from, and which to keep.

    checkpoints/step-000020/          a Hugging Face model folder, the learner's state, and run.json
    checkpoints/critic/step-000020/   the critic's, if the run has one: part of the checkpoint

Checkpoints are stored in a folder, or in an object store that fsspec knows by its URL. A checkpoint counts when all of
its parts exist. In a folder the learner writes under a temporary name and renames. An object store cannot rename, so
run.json, which names run, step and weights, is written last.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from rlhfless.spec import BestSpec, CheckpointSpec
from rlhfless.util.errors import UserError
from rlhfless.util.text import parsed_json

NOTES_FILE = "run.json"

STATE_FOLDER = "learner_state"
"""Folder of the learner's state, in addition to the model."""

CHECKPOINT_VERSION = 2

CHECKPOINTS_FOLDER = "checkpoints"

_PREFIX = "step-"


class CheckpointError(UserError):
    """A checkpoint cannot be written or read. The message names the folder."""


@dataclass(frozen=True, slots=True)
class CheckpointNotes:
    """The contents of run.json, which identify a checkpoint."""

    run_id: str
    attempt: int
    step: int
    """Training steps of its weights. The data position and seeds follow from it."""
    digest: str
    """Digest of the weights published after that step."""
    score: float | None
    """The score that decides the best checkpoint; None if not measured yet."""
    before: Mapping[str, float]
    """Held-out metrics before the first step."""
    kl_coefficient: float | None = None
    """KL coefficient of the next step, if it is adaptive."""
    metric: str = ""
    """The metric of `score`; empty in older checkpoints."""
    parts: tuple[str, ...] = ()
    """Functions, in addition to the learner, whose state the checkpoint contains."""
    version: int = CHECKPOINT_VERSION

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    location: str
    """Folder or URL."""
    notes: CheckpointNotes


class Checkpoints:
    def __init__(self, where: str | Path, keep_last: int, best: BestSpec | None = None) -> None:
        """`where`: a folder, or the URL of a folder in an object store.

        Raises CheckpointError if no installed file system reads it.
        """
        self._where = str(where)
        self._files, self._root = files_of(self._where)
        self._keep_last = keep_last
        self._best = best or BestSpec()

    def location(self, step: int, part: str = "") -> str:
        """Return the folder or URL of a step's checkpoint, or of one of its parts."""
        where = self._where if is_url(self._where) else str(Path(self._where).absolute())
        return "/".join(filter(None, (where.rstrip("/"), part, _name(step))))

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints by step. Raises CheckpointError for another format version or an unreadable
        store."""
        try:
            written = self._written("")
            parts = {path.removeprefix(f"{self._root.rstrip('/')}/") for path in self._written("*/")}
        except Exception as error:  # each kind of store raises its own errors
            raise CheckpointError(f"the checkpoints at {self._where} cannot be read: {error}") from error
        found = [Checkpoint(self._url(path), read_notes(self._url(path))) for path in written]
        return [each for each in found if {f"{part}/{_name(each.notes.step)}" for part in each.notes.parts} <= parts]

    def _written(self, below: str) -> list[str]:
        """Return the completely written checkpoints, there or in each folder `below`, by name."""
        folders = sorted(self._files.glob(f"{self._root.rstrip('/')}/{below}{_PREFIX}*"))
        return [path for path in folders if not is_url(self._where) or self._files.exists(f"{path}/{NOTES_FILE}")]

    def newest(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None if there is none."""
        return next(reversed(self.all()), None)

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the best of these by score; the newest among equals or without scores. Scores of other metrics are
        ignored."""
        sign = -1 if self._best.mode == "min" else 1

        def rank(checkpoint: Checkpoint) -> tuple[float, int]:
            score = self.score(checkpoint.notes)
            return -math.inf if score is None else sign * score, checkpoint.notes.step

        return max(checkpoints, key=rank, default=None)

    def score(self, notes: CheckpointNotes) -> float | None:
        """Return the value of `checkpoint.best.metric`; None if it was not measured."""
        counts = notes.score is not None and not math.isnan(notes.score) and notes.metric in ("", self._best.metric)
        return notes.score if counts else None

    def best_by(self, checkpoint: Checkpoint | None) -> str:
        """Describe why a checkpoint is the best: `eval/reward_mean = 0.8125 after step 20, the largest of ...`."""
        score, metric = self.score(checkpoint.notes) if checkpoint else None, self._best.metric
        if checkpoint is None or score is None:
            return f"the newest, because {metric} was not measured at a saved step"
        which = "smallest" if self._best.mode == "min" else "largest"
        return f"{metric} = {score:.4g} after step {checkpoint.notes.step}, the {which} of the saved steps"

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[int]:
        """Return the steps to keep: the last `keep_last` and the best."""
        steps, best = sorted(checkpoint.notes.step for checkpoint in checkpoints), self.best(checkpoints)
        return {*steps[-self._keep_last :], *([best.notes.step] if best else [])}

    def prune(self) -> list[str]:
        """Delete all checkpoints but the last few and the best, and remains of others. Return the deleted locations.

        Call only while no checkpoint is being written.
        """
        checkpoints = self.all()
        keep = self.kept(checkpoints)
        gone = [checkpoint.location for checkpoint in checkpoints if checkpoint.notes.step not in keep]
        for location in gone:
            remove(location)
        names = {_name(step) for step in keep}
        for path in self._written("*/"):
            if path.rpartition("/")[2] not in names:
                remove(self._url(path))
        return gone

    @contextmanager
    def token(self) -> Iterator[str]:
        """Create a file for others to look for, and delete it when the block ends. Raises CheckpointError if it cannot
        be written."""
        path = f"{self._root.rstrip('/')}/.token-{uuid.uuid4().hex}"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(path, b"rlhfless")
        except Exception as error:  # each kind of store raises its own errors
            raise CheckpointError(f"nothing can be written to {self._where}: {error}") from error
        try:
            yield self._url(path)
        finally:
            self._files.rm_file(path)

    def _url(self, path: str) -> str:
        return str(self._files.unstrip_protocol(path)) if is_url(self._where) else path


def _name(step: int) -> str:
    return f"{_PREFIX}{step:06d}"


def is_url(location: str) -> bool:
    """Return whether a location is an fsspec URL rather than a path."""
    return "://" in location


def files_of(location: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a location, and the path in it. Raises CheckpointError if none is installed for it."""
    try:
        files, path = url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"checkpoint.url {location!r}: {error}") from error
    return files, str(path)


def remove(location: str) -> None:
    """Delete a checkpoint, or the remains of one."""
    files, path = files_of(location)
    if is_url(location):
        if files.exists(f"{path}/{NOTES_FILE}"):  # first, because the other files are no checkpoint without it
            files.rm_file(f"{path}/{NOTES_FILE}")
    elif files.exists(path):
        # Rename first: an interrupted deletion must not leave half a checkpoint under the name of a complete one.
        folder = Path(path)
        path = str(folder.rename(folder.with_name(f".{folder.name}.deleted")))
    if files.exists(path):
        files.rm(path, recursive=True)


def is_of_model(name: str) -> bool:
    """Return whether a file of a checkpoint, by its path there, belongs to the model or tokenizer."""
    return name != NOTES_FILE and not name.startswith(f"{STATE_FOLDER}/")


def export_model(location: str, folder: Path, complete: Callable[[Path, Path], None] | None = None) -> CheckpointNotes:
    """Copy a checkpoint's model and tokenizer to a new folder, without the learner's state, and return its notes.

    `location`: a checkpoint's folder or URL, or a run's folder (its newest checkpoint). `complete(copy, new)` makes the
    folder from the copied files. Raises CheckpointError if there is no checkpoint, it cannot be copied, or the folder
    exists.
    """
    if not is_url(location) and (of_run := Path(location) / CHECKPOINTS_FOLDER).is_dir():
        newest = Checkpoints(of_run, keep_last=1).newest()
        if newest is None:
            raise CheckpointError(f"{of_run} holds no complete checkpoint")
        location = newest.location
    notes = read_notes(location)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; choose another folder")
    files, path = files_of(location)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    completed = fresh.with_suffix(".complete")
    try:
        for name in files.find(path):
            relative = name[len(path) :].lstrip("/")
            if is_of_model(relative):
                (fresh / relative).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(name, str(fresh / relative))
        if complete is not None:
            complete(fresh, completed)
        (fresh if complete is None else completed).rename(folder)
    except UserError:
        raise
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(f"the model of {location} could not be copied to {folder}: {error}") from error
    finally:
        for left in (fresh, completed):
            shutil.rmtree(left, ignore_errors=True)
    return notes


def checkpoints_of(run_folder: Path, spec: CheckpointSpec) -> Checkpoints:
    """Return the checkpoints of a run: in its folder, or below `checkpoint.url`. Raises CheckpointError."""
    where = f"{spec.url.rstrip('/')}/{run_folder.name}" if spec.url else str(run_folder / CHECKPOINTS_FOLDER)
    return Checkpoints(where, spec.keep_last, spec.best)


def read_notes(location: str | Path) -> CheckpointNotes:
    """Read a checkpoint's notes. Raises CheckpointError if it is not a checkpoint or has another version."""
    files, path = files_of(str(location))
    try:
        content = parsed_json(files.cat_file(f"{path}/{NOTES_FILE}"))
        if not isinstance(content, dict):
            raise TypeError(f"it is a {type(content).__name__}, not a mapping")
        version = content.get("version")
        if version != CHECKPOINT_VERSION:
            raise CheckpointError(f"{location} has version {version}, and this rlhfless knows {CHECKPOINT_VERSION}")
        content.pop("prompts", None)  # older checkpoints had what the trace says of them
        return CheckpointNotes(**content | {"parts": tuple(content.get("parts", ()))})
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{location} is not a checkpoint of a run: {NOTES_FILE}: {error}") from error
