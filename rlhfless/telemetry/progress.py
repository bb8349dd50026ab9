"""The progress display of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

FOR_DEVICES = "waiting for devices"
"""First words of a wait for granted devices; a service that knows why the devices do not come adds the reason."""


class RunProgress(Protocol):
    """The progress display of a run: a terminal or a service."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Shows what is being waited for as long as the block lasts; for long waits, such as a start."""

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Like `waiting`, for a stage of a step."""

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        """Tells, before anything is started, that the run goes on after a step; earlier attempts took `earlier_s`."""

    def show(self, content: str) -> None:
        """Shows a line."""
