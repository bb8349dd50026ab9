"""The address with which a process on another machine reads from a store."""

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
"""A marker file in the folder that the learner writes to."""


class StoreNotShared(UserError):
    """The store's folder is not shared by all nodes, but must be."""

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
    """The folder that an HTTP store serves; engines on its node read it directly and need no cache."""
    wait_s: float | None = None
    """Longest wait of a reader for a learner that takes part in loads (cuda_ipc)."""

    def mark(self) -> None:
        """Mark the folder as the learner's, so that `require_shared` passes on all nodes that share it."""
        (Path(self.folder) / MARKER).touch()

    def require_shared(self) -> None:
        """Raise StoreNotShared if this node's folder is not the learner's."""
        if not self.token and not (Path(self.folder) / MARKER).exists():
            raise StoreNotShared(
                f"weights.transport is {self.transport}, but {self.folder!r} on node {os.uname().nodename} is not the "
                "folder that the learner writes to. Set weights.transport to auto or http, or to file with a "
                "weights.folder that all nodes share"
            )

    def connect(self) -> WeightReader:
        """Create a reader of the store, without reading anything yet."""
        # Imported here: addresses also pass through processes that never read; they need not spend 2 s importing torch.
        from rlhfless.weights.broadcast import BroadcastReader
        from rlhfless.weights.buckets import BucketReader
        from rlhfless.weights.digest import piece_hash_of
        from rlhfless.weights.http import HttpStore
        from rlhfless.weights.store import FolderStore

        if not self.token:
            return BucketReader(self.folder, self.wait_s) if self.transport == "cuda_ipc" else FolderStore(self.folder)
        pulled = HttpStore(self.token, self.folder, self.home, piece_hash_of(self.transport))
        return BroadcastReader(pulled) if self.transport == "nccl" else pulled
