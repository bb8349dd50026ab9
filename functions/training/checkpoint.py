"""Checkpoints: a Hugging Face model folder that any tool can load, plus the learner's state.

    step-000020/
      config.json, model.safetensors, tokenizer     the published weights, written tensor by tensor by rank 0; of a
                                                    model with an adapter only the adapter, in PEFT's files
      learner_state/                                torch.distributed.checkpoint: each rank writes its own shards
      run.json                                      the run's notes

Any number of ranks can read the state. A folder is written under a temporary name, synced and renamed, so a checkpoint
with its final name is complete. In an object store each rank uploads its files, and run.json comes last: it marks the
checkpoint as complete. A failure on one rank raises on all.

All functions are collective, on a separate process group (`Savers`), so they may run in a thread during learning.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from transformers import PreTrainedModel

from rlhfless.functions.lora import ADAPTER_FILE, write_adapter_config
from rlhfless.functions.sharding import class_of
from rlhfless.functions.training.publishing import CONFIG_FILE, GENERATION_FILE, write_model_files
from rlhfless.records.checkpoints import NOTES_FILE, STATE_FOLDER, CheckpointError, files_of, is_url, remove
from rlhfless.spec import ModelSpec
from rlhfless.weights.files import TensorStream, write_file

WEIGHTS_FILE = "model.safetensors"

log = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Suffix of a checkpoint that is being written."""

T = TypeVar("T")


@dataclass(slots=True)
class Savers:
    """The ranks' process group for checkpoints."""

    group: dist.ProcessGroup
    phase: str = "nothing"
    """The part of a checkpoint being written, or written last."""

    @classmethod
    def of(cls, timeout_s: float) -> Savers:
        """Create a process group of all ranks. *Collective*."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert group is not None
        return cls(group)

    @property
    def first(self) -> bool:
        return dist.get_rank(self.group) == 0

    def all(self, value: T) -> list[T]:
        """Gather a value from each rank. *Collective*."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, phase: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank; a failure on one rank raises on all. *Collective*."""
        self.phase = phase
        value, failure, cause = None, None, None
        try:
            value = action()
        except (Exception, CheckpointException) as error:  # file systems and object stores raise errors of their own
            failure, cause = f"{type(error).__name__}: {_first_failure(error)}", error
        if first := next((text for text in self.all(failure) if text), None):
            raise _RankFailed(first) from cause
        return value  # type: ignore[return-value]  # set unless an error was raised


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a checkpoint holds."""

    model: PreTrainedModel
    spec: ModelSpec
    stream: TensorStream
    state: dict[str, Any]
    notes: Mapping[str, Any]
    savers: Savers

    def write(self, folder: Path) -> None:
        """*Collective*."""
        together = self.savers.together
        _write_state(folder, self.state, self.savers)
        name = WEIGHTS_FILE if self.spec.lora is None else ADAPTER_FILE
        together(name, lambda: self._write_weights(folder / name))
        together("the model's files", lambda: self._write_files(folder) if self.savers.first else None)

    def _write_weights(self, path: Path) -> None:
        if not self.savers.first:
            drain(self.stream)
            return
        try:
            with path.open("xb+") as file:
                write_file(file, self.stream, {"format": "pt"})
        except BaseException:
            drain(self.stream)  # the other ranks wait for each tensor
            raise

    def _write_files(self, folder: Path) -> None:
        write_files(folder, self.spec, self.model)
        (folder / NOTES_FILE).write_text(json.dumps(dict(self.notes), indent=2))


def write_files(folder: Path, spec: ModelSpec, model: PreTrainedModel) -> None:
    """Write all files of the model except its weights. Raises CheckpointError."""
    kind = class_of(model)
    own_code = kind if model.is_remote_code() else None
    write_model_files(folder, spec, copy.deepcopy(model.config), kind.__name__, own_code)
    if spec.lora is not None:
        write_adapter_config(folder, spec, model)
        for name in (CONFIG_FILE, GENERATION_FILE):  # the folder holds no model
            (folder / name).unlink(missing_ok=True)


def try_files(spec: ModelSpec, model: PreTrainedModel, savers: Savers) -> None:
    """Write the model's files to a temporary folder, so that errors show before the first checkpoint. *Collective.*

    Raises CheckpointError.
    """
    with tempfile.TemporaryDirectory(prefix="rlhfless-trial-") as folder:
        try:
            savers.together(
                "the model's files", lambda: write_files(Path(folder), spec, model) if savers.first else None
            )
        except _RankFailed as error:
            raise CheckpointError(f"no checkpoint of this run could be written ({error})") from error


def save_checkpoint(
    location: str,
    model: PreTrainedModel,
    spec: ModelSpec,
    stream: TensorStream,
    state: dict[str, Any],
    notes: Mapping[str, Any],
    savers: Savers,
) -> None:
    """Write a checkpoint to a folder or URL, replacing an existing one. *Collective.*

    Writes `stream` and the tokenizer in Hugging Face format, `state`, and `notes` as JSON. Raises CheckpointError if
    the write fails; an existing folder is then unchanged.
    """
    contents = _Contents(model, spec, stream, state, notes, savers)
    try:
        (_to_store if is_url(location) else _to_folder)(location, contents.write, savers)
    except _RankFailed as error:
        parent = Path(location).parent
        free_mib = shutil.disk_usage(parent).free // 2**20 if parent.exists() else 0
        where = location if is_url(location) else f"{free_mib} MiB are free there"
        raise CheckpointError(
            f"the checkpoint {location} could not be written ({error}); {where}. "
            "Earlier checkpoints are untouched: correct that, such as by freeing some space, and resume the run"
        ) from error


def _write_state(folder: Path, state: dict[str, Any], savers: Savers) -> None:
    """Write each rank's part of a state. *Collective.*"""
    writer = dcp.FileSystemWriter(folder / STATE_FOLDER)
    savers.together(STATE_FOLDER, lambda: dcp.save(state, storage_writer=writer, process_group=savers.group))


def restore_checkpoint(location: str, state: dict[str, Any]) -> None:
    """Load a checkpoint's state into the tensors of `state`. *Collective.*

    Raises FileNotFoundError if the checkpoint has no state, and CheckpointError if it cannot be read.
    """
    with _readable_at(location) as folder:
        if not folder.is_dir():
            raise FileNotFoundError(f"{location} holds no {STATE_FOLDER}: no learner wrote it")
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint {location} cannot be read: {_first_failure(error)}") from error


def drain(stream: TensorStream) -> None:
    """Exhaust a stream. Every rank must do so."""
    for _ in stream.tensors:
        pass


class _RankFailed(RuntimeError):
    """A failure on at least one rank, raised on all."""


def _first_failure(error: BaseException) -> str:
    """Return the first failure in torch's error, which lists all ranks with their traces."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))[0]
        return f"{type(inner).__name__}: {inner}"
    return str(error)


def _to_folder(location: str, write: Callable[[Path], None], savers: Savers) -> None:
    """Write to a temporary folder next to `location`, then rename it. All ranks must see the folder."""
    folder = Path(location)
    name = savers.all(uuid.uuid4().hex)[0]
    fresh = folder.with_name(f".{folder.name}.{name}{PARTIAL}")
    previous = folder.with_name(f".{folder.name}.{name}.previous")
    try:
        savers.together("an empty folder", lambda: _begin(fresh) if savers.first else None)
        write(fresh)
        savers.together("sync and rename", lambda: _replace(folder, fresh, previous) if savers.first else None)
    finally:
        if savers.first:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(previous, ignore_errors=True)


def _begin(fresh: Path) -> None:
    """Create a folder, and remove partial checkpoints of dead learners."""
    for left in fresh.parent.glob(f".*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)


def _replace(folder: Path, fresh: Path, previous: Path) -> None:
    for file in (*fresh.rglob("*"), fresh):
        _sync(file)
    if folder.exists():  # a folder cannot be renamed onto a non-empty one
        folder.rename(previous)
    fresh.rename(folder)
    _sync(folder.parent)


def _to_store(location: str, write: Callable[[Path], None], savers: Savers) -> None:
    """Write to a local folder on each rank, then upload it; run.json comes last."""
    with tempfile.TemporaryDirectory(prefix="rlhfless-checkpoint-") as scratch:
        folder = Path(scratch) / location.rsplit("/", 1)[-1]
        savers.together("an empty folder", folder.mkdir)
        write(folder)
        # An earlier attempt may have left some files.
        savers.together("the removal of an earlier attempt", lambda: remove(location) if savers.first else None)
        savers.together("the upload", lambda: _upload(folder, location, lambda name: name != NOTES_FILE))
        savers.together(
            f"the upload of {NOTES_FILE}", lambda: _upload(folder, location, lambda name: name == NOTES_FILE)
        )


def _upload(folder: Path, location: str, chosen: Callable[[str], bool]) -> None:
    files, path = files_of(location)
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    for name in filter(chosen, names):
        target = f"{path}/{name}"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        files.put_file(str(folder / name), target)


@contextmanager
def _readable_at(location: str) -> Iterator[Path]:
    """Yield a local folder with a checkpoint's state. Raises CheckpointError if it cannot be downloaded."""
    if not is_url(location):
        yield Path(location) / STATE_FOLDER
        return
    with tempfile.TemporaryDirectory(prefix="rlhfless-checkpoint-") as scratch:
        files, path = files_of(location)
        try:
            files.get(f"{path}/{STATE_FOLDER}/", scratch, recursive=True)
        except Exception as error:  # every kind of store raises errors of its own
            raise CheckpointError(f"the checkpoint {location} cannot be read: {error}") from error
        yield Path(scratch)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
