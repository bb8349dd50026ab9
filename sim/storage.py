"""The disk of a simulated run, and its checkpoints, which outlive replicas and drivers."""

from __future__ import annotations

import errno
import json
from collections.abc import Collection
from itertools import count
from typing import Any

from rlhfless.records.checkpoints import NOTES_FILE, CheckpointError, Checkpoints, files_of, remove
from rlhfless.sim.trained import TrainedState

KEEP_LAST = 2
_numbers = count()


class SimulatedDisk:
    """Counts the writes of a run. The disk is full at some of them."""

    def __init__(self, full_at: Collection[int] = ()) -> None:
        """`full_at`: numbers of writes, from 1, that fail."""
        self.full_at = full_at
        self.writes = 0

    def write(self) -> None:
        """Count a write. Raises OSError if the disk is full."""
        self.writes += 1
        if self.writes in self.full_at:
            raise OSError(errno.ENOSPC, "the simulated disk is full")


class StoredCheckpoints(Checkpoints):
    """The checkpoints of a run, in memory."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(f"memory://simulated-{next(_numbers)}", KEEP_LAST)
        self._disk = disk
        self._states: dict[str, TrainedState] = {}
        """By path."""

    def write(self, location: str, state: TrainedState, notes: Any) -> None:
        """Write a checkpoint, or a part of one. Raises CheckpointError if the disk is full."""
        try:
            self._disk.write()
        except OSError as error:
            raise CheckpointError(f"{location} cannot be written: {error}") from error
        files, path = files_of(location)
        self._states[path] = state
        files.makedirs(path, exist_ok=True)
        files.pipe_file(f"{path}/{NOTES_FILE}", json.dumps(notes).encode())

    def read(self, location: str) -> TrainedState:
        """Return the state in a checkpoint. Raises CheckpointError if there is none."""
        files, path = files_of(location)
        if not files.exists(f"{path}/{NOTES_FILE}"):
            raise CheckpointError(f"{location} is not a checkpoint")
        return self._states[path]

    @property
    def final(self) -> TrainedState | None:
        """The state in the newest checkpoint; None if there is none."""
        newest = self.newest()
        return None if newest is None else self.read(newest.location)

    def close(self) -> None:
        """Free the memory."""
        for checkpoint in self.all():
            remove(checkpoint.location)
