"""A clock that a test sets. Timers (`asyncio.sleep`, timeouts) still count in real time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlhfless.util import clock
from rlhfless.util.clock import VirtualClock


class TickingClock(VirtualClock):
    """A clock on which each reading is a second later."""

    _reads = 0

    @property
    def now_s(self) -> float:  # type: ignore[override]
        self._reads += 1
        return float(self._reads)


@contextmanager
def reading(of: VirtualClock) -> Iterator[None]:
    """Let the block read the time from this clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_virtual", lambda: of)
        yield


@pytest.fixture(name="clock")
def set_clock() -> Iterator[VirtualClock]:
    """Return the clock of the test, which starts at 0."""
    of = VirtualClock()
    with reading(of):
        yield of
