"""Busy cores and free memory of the host, by what the kernel tells of its container."""

from __future__ import annotations

import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless.util import host

GIB = 2**30
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


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A container of cgroup version 2 on a machine with 900 GiB available."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * GIB))
    return tmp_path


def _write(folder: Path, limit: int | str, used: int, inactive: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 2\nshmem 3\ninactive_file {inactive}\nactive_file 4\n")


def test_page_cache_that_the_kernel_may_drop_is_free(container: Path) -> None:
    """A pod of 800 GiB that has read its models: 760 in use, 650 of them inactive page cache."""
    _write(container, 800 * GIB, 760 * GIB, 650 * GIB)
    assert host.free_bytes() == 690 * GIB


def test_a_container_has_no_more_than_its_machine(container: Path) -> None:
    _write(container, 2000 * GIB, 10 * GIB, 0)
    assert host.free_bytes() == 900 * GIB
    _write(container, "max", 10 * GIB, 0)
    assert host.free_bytes() == 900 * GIB


def test_without_a_container_the_machine_counts(container: Path) -> None:
    assert host.free_bytes() == 900 * GIB
