"""The address of a store: a process on another machine reads from the store with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhfless.weights.store import WeightReader


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """How an engine reaches the store."""

    kind: Literal["folder", "http"]
    folder: str
    """The store's folder, or the node's cache."""
    token: str = field(default="", repr=False)
    """Bearer token of an HTTP store; the location of each version is a full URL."""

    def connect(self) -> WeightReader:
        """A reader of the store. Nothing is read yet."""
        # Imported here: an address travels through processes that never read, and need not wait 2 s for
        # torch.
        from rlhfless.weights.http import HttpStore
        from rlhfless.weights.store import FolderStore

        return FolderStore(self.folder) if self.kind == "folder" else HttpStore(self.token, self.folder)
