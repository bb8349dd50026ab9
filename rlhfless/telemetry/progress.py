"""The interface of a run's progress display."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

FOR_DEVICES = "waiting for devices"
"""Prefix of a wait for granted devices. A service that knows the reason for the wait appends it."""


class RunProgress(Protocol):
    """The progress display of a run, on a terminal or in a service."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Show the awaited event within the block. For long waits, such as a start."""

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Show a stage of a step within the block."""

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        """Announce, before anything starts, that the run resumes after `step`; earlier attempts took `earlier_s`."""

    def show(self, content: str) -> None:
        """Show a line."""
