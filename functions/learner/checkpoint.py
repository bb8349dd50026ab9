"""Checkpoints: a Hugging Face model folder that any tool can load, plus the optimiser's state.

A folder is written under a temporary name, synced and renamed: a checkpoint that has its name is whole. To an object
store it is copied from a folder, and run.json, without which it is none, comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from rlhfless.functions.learner.publishing import cast_to, substituted
from rlhfless.records.checkpoints import NOTES_FILE, CheckpointError, files_of, is_url, remove
from rlhfless.spec import ModelSpec

STATE_FILE = "learner_state.pt"


def save_checkpoint(
    folder: Path, model: PreTrainedModel, spec: ModelSpec, state: dict[str, Any], notes: Mapping[str, Any]
) -> None:
    """Model in `spec.dtype`, tokenizer, `state` in STATE_FILE, and `notes` as JSON. Replaces `folder` if it exists.

    Raises CheckpointError if it cannot be written; `folder` is then unchanged.
    """

    def write(target: Path) -> None:
        with substituted(model, cast_to(spec.dtype)):
            model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer or spec.path, trust_remote_code=spec.trust_remote_code)
        tokenizer.save_pretrained(target)
        torch.save(state, target / STATE_FILE)
        (target / NOTES_FILE).write_text(json.dumps(dict(notes), indent=2))

    try:
        _replace_folder(folder, write)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own errors
        free_mib = shutil.disk_usage(folder.parent).free // 2**20 if folder.parent.exists() else 0
        raise CheckpointError(
            f"the checkpoint {folder} could not be written ({error}); {free_mib} MiB are free there. "
            "Earlier checkpoints are untouched: free some space and resume the run"
        ) from error


@contextmanager
def written_to(location: str) -> Iterator[Path]:
    """Where to write a checkpoint; after the block it is at `location`, a folder or a URL.

    Raises CheckpointError if it cannot be copied there.
    """
    if not is_url(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="rlhfless-checkpoint-") as scratch:
        folder = Path(scratch) / location.rsplit("/", 1)[-1]
        yield folder
        try:
            _upload(folder, location)
        except CheckpointError:
            raise
        except Exception as error:  # every kind of store has errors of its own
            raise CheckpointError(
                f"the checkpoint could not be copied to {location} ({type(error).__name__}: {error}). Earlier "
                "checkpoints are untouched: mend that and resume the run"
            ) from error


@contextmanager
def readable_at(location: str) -> Iterator[Path]:
    """A folder with the checkpoint at `location`, a folder or a URL. Raises CheckpointError if it cannot be copied."""
    if not is_url(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="rlhfless-checkpoint-") as scratch:
        files, path = files_of(location)
        try:
            files.get(f"{path}/", scratch, recursive=True)
        except Exception as error:  # every kind of store has errors of its own
            raise CheckpointError(f"the checkpoint {location} cannot be read: {error}") from error
        yield Path(scratch)


def _upload(folder: Path, location: str) -> None:
    remove(location)  # an earlier attempt may have left a part of it
    files, path = files_of(location)
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    for name in sorted(names, key=lambda name: name == NOTES_FILE):
        target = f"{path}/{name}"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        files.put_file(str(folder / name), target)


def load_state(folder: Path, device: torch.device) -> dict[str, Any]:
    """The `state` of `save_checkpoint`. Raises FileNotFoundError if the folder holds none."""
    file = folder / STATE_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE_FILE}: no learner wrote it")
    state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    return state


def _replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    previous = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.previous")
    try:
        fresh.mkdir()
        write(fresh)
        for file in (*fresh.rglob("*"), fresh):
            _sync(file)
        if folder.exists():  # a folder cannot be renamed onto one that is not empty
            folder.rename(previous)
        fresh.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
