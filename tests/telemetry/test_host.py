"""How many cores of the machine are busy."""

from __future__ import annotations

import time
from collections import namedtuple

import pytest

from rlhfless.telemetry import host

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def test_busy_cores_are_all_time_but_idle_over_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 of user, 1 of system and 1 stolen in 5 s; guests are in user already."""
    readings = iter([Times(10, 0, 5, 100, 1, 0, 0, 0, 4, 0), Times(16, 0, 6, 102, 3, 0, 0, 1, 6, 0)])
    clock = iter([50.0, 55.0])
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(readings))
    monkeypatch.setattr(host.time, "monotonic", lambda: next(clock))
    assert host.BusyCores().mean() == pytest.approx(8 / 5)


def test_a_machine_says_something() -> None:
    busy = host.BusyCores()
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        pass
    assert busy.mean() > 0.0
