"""Passes changes of runs to their watchers, in commit order.

A watcher of one run gets every event after the last one it has seen: recent events from memory, older ones from the
database. A watcher of all runs gets each changed run; changes that arrive while the watcher is slow are merged.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rlhfless.control.database.tables import EventRow

KEPT = 512
"""Number of a run's events kept in memory: more than a watcher falls behind in a second."""

MOST_SHOWN = 2_000
"""Number of runs whose JSON and newest events are kept in memory, a few KiB each."""


class RunEvents:
    """Publishes changes of runs. Belongs to the event loop; only `publish` is thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._recent: dict[str, deque[EventRow]] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._watchers: set[_Watcher] = set()
        self._changes: dict[str, int] = {}
        self._shown: dict[str, bytes] = {}
        self._reading: dict[str, tuple[int, asyncio.Task[bytes]]] = {}
        """By run id: the number of changes before the read started, and the read."""

    async def json_of(self, run_id: str, read: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Return a run's JSON, cached if the run has not changed since. Concurrent requests share one read.

        Raises any error of `read`.
        """
        if (kept := self._shown.get(run_id)) is not None:
            return kept
        change = self._changes.get(run_id, 0)
        began, reading = self._reading.get(run_id, (-1, None))
        if reading is None or began != change:
            reading = asyncio.create_task(read())
            self._reading[run_id] = change, reading
            reading.add_done_callback(lambda done: self._keep_json(run_id, change, done))
        return await asyncio.shield(reading)

    def _keep_json(self, run_id: str, change: int, reading: asyncio.Task[bytes]) -> None:
        if self._reading.get(run_id, (-1, None))[0] == change:
            del self._reading[run_id]
        if reading.cancelled() or reading.exception() is not None or self._changes.get(run_id, 0) != change:
            return
        self._shown[run_id] = reading.result()
        while len(self._shown) > MOST_SHOWN:
            del self._shown[next(iter(self._shown))]

    def publish(self, changed: Mapping[str, Sequence[EventRow]]) -> None:
        """Publish the changed runs, each with its new events."""
        self.loop.call_soon_threadsafe(self._publish, changed)

    def _publish(self, changed: Mapping[str, Sequence[EventRow]]) -> None:
        for run_id, events in changed.items():
            self._changes[run_id] = self._changes.get(run_id, 0) + 1
            self._shown.pop(run_id, None)
            if events:
                if run_id not in self._recent and len(self._recent) >= MOST_SHOWN:
                    del self._recent[next(iter(self._recent))]  # its watchers read the database
                self._recent.setdefault(run_id, deque(maxlen=KEPT)).extend(events)
                for waiter in self._waiting.get(run_id, ()):
                    waiter.set()
            for watcher in self._watchers:
                watcher.add(run_id)

    def recent(self, run_id: str, after: int) -> Sequence[EventRow] | None:
        """Return the run's events after number `after`; None if memory does not have all of them."""
        kept = self._recent.get(run_id)
        if not kept or kept[0].seq > after + 1:
            return None
        return list(itertools.dropwhile(lambda event: event.seq <= after, kept))

    async def more(self, run_id: str, after: int, timeout_s: float) -> bool:
        """Wait for an event after number `after`, and return False after `timeout_s`."""
        kept = self._recent.get(run_id)
        if kept and kept[-1].seq > after:
            return True
        waiter = asyncio.Event()
        waiters = self._waiting.setdefault(run_id, set())
        waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiting.pop(run_id, None)
        return True

    def forget(self, run_id: str) -> None:
        self._recent.pop(run_id, None)

    def watch(self) -> _Watcher:
        """Return a watcher of all runs. The caller closes it."""
        watcher = _Watcher(self._watchers.discard)
        self._watchers.add(watcher)
        return watcher


class _Watcher:
    def __init__(self, on_close: Callable[[_Watcher], None]) -> None:
        self._changed: dict[str, None] = {}
        self._has_changes = asyncio.Event()
        self._on_close = on_close

    def add(self, run_id: str) -> None:
        self._changed[run_id] = None
        self._has_changes.set()

    async def changed(self, timeout_s: float) -> list[str]:
        """Wait for changes, and return the ids of the runs that changed since the last call; none after `timeout_s`."""
        try:
            await asyncio.wait_for(self._has_changes.wait(), timeout_s)
        except TimeoutError:
            return []
        changed, self._changed = list(self._changed), {}
        self._has_changes.clear()
        return changed

    def close(self) -> None:
        self._on_close(self)
