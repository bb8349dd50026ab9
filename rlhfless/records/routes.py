"""Routes in files beside the journal: what an engine recorded of a response, raw small integers in NumPy's format.

An engine writes one file per turn: row i has the experts of the turn's i-th token, `[layers, k]`, as of when the engine
computed it. The last token of a turn was not computed, and has no row. Records name files and rows (RouteSpan). The
routes themselves, 48 times as many bytes as tokens and logprobs for a 30B, pass neither the driver nor the journal. A
file that is gone costs nothing but the replay of its tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt

FOLDER = "routes"
"""Folder of the files, in the run's folder."""

Rows = npt.NDArray[np.int16]
"""Experts by token, layer and place, `[tokens, layers, k]`; -1 where unknown."""

StoredRows = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""The same in a file, where the largest value of the format stands for unknown."""


def stored(rows: Rows, experts: int) -> StoredRows:
    """Return routes as they are stored, in one byte each with up to 255 experts."""
    if experts < 256:
        return np.where(rows < 0, np.iinfo(np.uint8).max, rows).astype(np.uint8)
    return np.where(rows < 0, np.iinfo(np.uint16).max, rows).astype(np.uint16)


def as_rows(values: StoredRows) -> Rows:
    """Return stored routes as numbers; the inverse of `stored`."""
    rows: Rows = np.where(values == np.iinfo(values.dtype).max, -1, values.astype(np.int32)).astype(np.int16)
    return rows


def write_routes(path: Path, values: StoredRows) -> None:
    """Write a file, which is visible once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{uuid4().hex}.partial")
    with partial.open("wb") as file:
        np.save(file, values, allow_pickle=False)
    os.replace(partial, path)


def forget_routes(run_folder: Path, up_to_step: int, kept: Collection[str] = ()) -> None:
    """Delete the files of all steps up to this one, except those `kept`, which later steps still learn from."""
    for folder in (run_folder / FOLDER).glob("step-*"):
        if int(folder.name.partition("-")[2]) > up_to_step:
            continue
        if not any(name.startswith(f"{folder.name}/") for name in kept):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for file in folder.iterdir():
            if f"{folder.name}/{file.name}" not in kept:
                file.unlink(missing_ok=True)


def name_of(step: int) -> str:
    """Return a new file's name, relative to the folder."""
    return f"step-{step:06d}/{uuid4().hex}.npy"
