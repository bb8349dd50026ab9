"""The load of this machine."""

from __future__ import annotations

import time

import psutil

IDLE = ("idle", "iowait")
IN_OTHERS = ("guest", "guest_nice")
"""Already included in `user` and `nice`."""


class BusyCores:
    """Measures the mean number of busy CPU cores of this machine since construction."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()

    def mean(self) -> float:
        passed_s = time.monotonic() - self._began_s
        return (_busy_s() - self._busy_s) / passed_s if passed_s > 0 else 0.0


def _busy_s() -> float:
    times: dict[str, float] = psutil.cpu_times()._asdict()
    return sum(seconds for name, seconds in times.items() if name not in (*IDLE, *IN_OTHERS))
