"""What a pool tells, kept."""

from __future__ import annotations

from typing import Any

from rlhfless.fleet.replica import Replica


class Watcher:
    """Work that hears of all replicas and has nothing to hand back."""

    over = False

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def joined(self, slot: int) -> None:
        self.heard.append(("joined", slot))

    def missed(self, slot: int) -> None:
        self.heard.append(("missed", slot))

    async def drain(self, replica: Replica) -> None:
        self.heard.append(("drain", replica.name))
