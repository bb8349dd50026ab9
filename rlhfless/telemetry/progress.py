"""How a run shows what it does and waits for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

FOR_DEVICES = "waiting for devices"
"""How a wait for devices that a run was promised begins; a service that knows why they do not come adds it."""


class RunProgress(Protocol):
    """A terminal, or a service that is told."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Shows what is being waited for as long as the block lasts; for long waits, such as a start."""

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Like `waiting`, for a stage of a step."""

    def show(self, content: str) -> None:
        """Shows a line."""
