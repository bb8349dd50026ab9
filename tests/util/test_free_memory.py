"""The host memory that a process can still get, by what the kernel tells of its container."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless.util import free_memory

GIB = 2**30


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A container of cgroup version 2 on a machine with 900 GiB available."""
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * GIB))
    return tmp_path


def _write(folder: Path, limit: int | str, used: int, inactive: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 2\nshmem 3\ninactive_file {inactive}\nactive_file 4\n")


def test_page_cache_that_the_kernel_may_drop_is_free(container: Path) -> None:
    """A pod of 800 GiB that has read its models: 760 in use, 650 of them inactive page cache."""
    _write(container, 800 * GIB, 760 * GIB, 650 * GIB)
    assert free_memory.free_bytes() == 690 * GIB


def test_a_container_has_no_more_than_its_machine(container: Path) -> None:
    _write(container, 2000 * GIB, 10 * GIB, 0)
    assert free_memory.free_bytes() == 900 * GIB
    _write(container, "max", 10 * GIB, 0)
    assert free_memory.free_bytes() == 900 * GIB


def test_without_a_container_the_machine_counts(container: Path) -> None:
    assert free_memory.free_bytes() == 900 * GIB
