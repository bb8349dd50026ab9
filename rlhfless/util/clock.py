"""The clock of a run: the time as its event loop counts it.

Clock and timers are one object, the running event loop, so they cannot disagree. A live run has asyncio's own loop, and
reads the system's clocks. A simulated run has a loop whose clock jumps to its next timer (a `VirtualClock`); then both
times below are the loop's.
"""

from __future__ import annotations

import asyncio
import time


class VirtualClock:
    """A mixin of event loops that count time themselves."""

    now_s = 0.0
    """Seconds since the start of the loop."""


def unix_s() -> float:
    """Return the Unix time, for records that other processes read; in a simulation, seconds since its start."""
    virtual = _virtual()
    return time.time() if virtual is None else virtual.now_s


def monotonic_s() -> float:
    """Return seconds from an arbitrary point, for waits and limits: changes of the system's time do not affect it."""
    virtual = _virtual()
    return time.monotonic() if virtual is None else virtual.now_s


def _virtual() -> VirtualClock | None:
    """Return the running event loop if it counts time itself."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # code of a thread, or of a process without a loop
        return None
    return loop if isinstance(loop, VirtualClock) else None
