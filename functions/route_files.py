"""Sources of the routes that a learner replays: an engine's files, and its own records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhfless.records import IntArray
from rlhfless.records.routes import Rows, StoredRows, as_rows

log = logging.getLogger(__name__)


class RouteFiles:
    """Reads routes; a RouteSource."""

    def __init__(self, folder: Path, layers: int, k: int) -> None:
        self._folder, self._shape = folder, (layers, k)
        self._warned = False

    def rows(self, files: Sequence[str], file: IntArray, row: IntArray) -> Rows:
        """See RouteSource. Routes of a file that cannot be read are -1."""
        found = np.full((len(file), *self._shape), -1, dtype=np.int16)
        for number in np.unique(file):
            chosen = np.flatnonzero(file == number)
            stored_rows = self._open(files[number])
            if stored_rows is None:
                continue
            inside = chosen[row[chosen] < len(stored_rows)]
            found[inside] = as_rows(stored_rows[row[inside]])
        return found

    def _open(self, name: str) -> StoredRows | None:
        path = self._folder / name
        try:
            stored_rows = np.load(path, mmap_mode="r", allow_pickle=False)
            if stored_rows.shape[1:] != self._shape or stored_rows.dtype.kind != "u":
                raise ValueError(f"it has {stored_rows.dtype} of shape {stored_rows.shape[1:]}, not {self._shape}")
        except (OSError, ValueError) as error:
            if not self._warned:
                log.warning("routes in %s cannot be read, and are not replayed: %s", path, error)
                self._warned = True
            return None
        rows: StoredRows = stored_rows
        return rows


class RecordedRoutes:
    """Routes that this rank's own passes recorded; a RouteSource whose files are numbers."""

    def __init__(self) -> None:
        self._arrays: list[Rows] = []

    def add(self, rows: Rows) -> str:
        """Keep routes; return the name of their file."""
        self._arrays.append(rows)
        return str(len(self._arrays) - 1)

    def rows(self, files: Sequence[str], file: IntArray, row: IntArray) -> Rows:
        """See RouteSource."""
        found = np.empty((len(file), *self._arrays[0].shape[1:]), dtype=np.int16)
        for number in np.unique(file):
            chosen = file == number
            found[chosen] = self._arrays[int(files[number])][row[chosen]]
        return found
