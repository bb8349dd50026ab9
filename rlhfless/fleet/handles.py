"""Calls to a replica, whatever runs it: the handle that the fleet needs. Ray Serve's is in
rlhfless.fleet.serve_handles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from rlhfless.functions.calls import Reply


class HandleLost(RuntimeError):
    """The replica behind a handle died, or cannot be reached."""


class PendingReply(Awaitable[Reply[Any]], Protocol):
    """The answer to a call. Awaiting it raises HandleLost, or the method's own error."""

    async def sent(self) -> None:
        """Wait until the call has left this process. Raises as the answer does."""


class Handle(Protocol):
    """One replica."""

    def call(self, method: str, *arguments: object, **keywords: object) -> PendingReply:
        """Send a call."""

    def stream(self, method: str, *arguments: object) -> AsyncIterator[Any]:
        """Send a call whose answer is a stream of events. The iterator raises as a PendingReply does."""
