"""The address of a store: a process on another machine reads from the store with it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless.spec import Transport
from rlhfless.util.errors import UserError

if TYPE_CHECKING:
    from rlhfless.weights.store import WeightReader


MARKER = ".learner"
"""A file in the folder that the learner writes to."""


class StoreNotShared(UserError):
    """A store that should be one folder for all nodes is not."""

    where = "weights.transport"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """How an engine reaches the store."""

    transport: Transport
    folder: str
    """The store's folder, or the node's cache."""
    token: str = field(default="", repr=False)
    """Bearer token of an HTTP store; the location of each version is a full URL."""
    home: str = ""
    """The folder that an HTTP store serves: engines on its own node read there, and need no cache."""
    wait_s: float | None = None
    """The longest wait of a reader for a learner that takes part in loads (cuda_ipc)."""

    def mark(self) -> None:
        """Mark the folder as the learner's: from then on `require_shared` passes on all nodes that share it."""
        (Path(self.folder) / MARKER).touch()

    def require_shared(self) -> None:
        """Raises StoreNotShared if this node's folder is not the learner's."""
        if not self.token and not (Path(self.folder) / MARKER).exists():
            raise StoreNotShared(
                f"weights.transport is {self.transport}, but {self.folder!r} on node {os.uname().nodename} is not the "
                "folder that the learner writes to. Set weights.transport to auto or http, or to file with a "
                "weights.folder that all nodes share"
            )

    def connect(self) -> WeightReader:
        """A reader of the store. Nothing is read yet."""
        # Imported here: an address travels through processes that never read, and need not wait 2 s for
        # torch.
        from rlhfless.weights.broadcast import BroadcastReader
        from rlhfless.weights.buckets import BucketReader
        from rlhfless.weights.digest import piece_hash_of
        from rlhfless.weights.http import HttpStore
        from rlhfless.weights.store import FolderStore

        if not self.token:
            return BucketReader(self.folder, self.wait_s) if self.transport == "cuda_ipc" else FolderStore(self.folder)
        pulled = HttpStore(self.token, self.folder, self.home, piece_hash_of(self.transport))
        return BroadcastReader(pulled) if self.transport == "nccl" else pulled
