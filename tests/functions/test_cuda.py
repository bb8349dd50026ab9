"""A function that was given GPUs never computes on CPUs instead."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions import devices
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.devices import ALLOCATOR, NoCuda, cuda_fault, require_cuda
from rlhfless.functions.ranks import RankActor

NO_DRIVER = "no NVIDIA driver is there (/proc/driver/nvidia/version); install NVIDIA's driver on the node"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 02:44:37 UTC 2025\nGCC version: 12.2.0"


@pytest.mark.parametrize(
    ("wheel", "driver", "said"),
    [
        (None, None, "is a wheel for CPUs, and no NVIDIA driver is there"),
        (None, OLD, "driver there is 570.86.15; install the wheels of requirements/gpu.txt"),
        ("13.0", None, "is built for CUDA 13.0, and " + NO_DRIVER),
        ("13.0", OLD, "driver there is 570.86.15; CUDA 13.0 needs driver 580 or newer"),
        ("12.8", OLD, "is new enough: `nvidia-smi`"),
    ],
)
def test_the_error_names_driver_wheel_and_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: str | None, driver: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", wheel)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    if driver is not None:
        monkeypatch.setattr(devices, "DRIVER_VERSION", tmp_path / "version")
        (tmp_path / "version").write_text(driver)
    with pytest.raises(NoCuda) as told:
        require_cuda()
    assert said in str(told.value)
    assert "its GPUs 2,3: torch " in str(told.value)
    assert "\n" not in str(told.value), "it is found in the trace of a process by its line"


def test_the_end_of_an_engine_is_told_by_its_cause() -> None:
    trace = "the engine's process failed:\nTraceback\n  raise\nrlhfless.functions.devices.NoCuda: no CUDA on n: why\n"
    assert str(cuda_fault(trace)) == "no CUDA on n: why"
    assert cuda_fault("the engine's process failed:\nKeyError: 'no such layer'") is None


@pytest.mark.parametrize(("kind", "loads"), [("cuda", False), ("cpu", True)])
def test_a_rank_that_was_given_a_gpu_loads_nothing_on_cpus(
    monkeypatch: pytest.MonkeyPatch, kind: str, loads: bool
) -> None:
    """Of learner, reference and reward model: they have this start in common."""
    loaded: list[str] = []

    class Rank(RankActor[Any]):
        def _load(self, address: str) -> None:
            loaded.append(address)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # put back at the end: the binding writes it
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rank = Rank(SimpleNamespace(rank_bindings=(DeviceBinding(kind, ("0",), exclusive=False),)), 0)
    if loads:
        rank.start("file:///there", False)
    else:
        with pytest.raises(NoCuda):
            rank.start("file:///there", False)
    assert bool(loaded) is loads


@pytest.mark.parametrize(
    ("kind", "shares", "expected"),
    [
        ("cpu", False, None),
        ("cuda", False, "pinned_max_round_threshold_mb:1,expandable_segments:True"),
        ("cuda", True, "pinned_max_round_threshold_mb:1"),
    ],
)
def test_the_allocators_of_a_rank(monkeypatch: pytest.MonkeyPatch, kind: str, shares: bool, expected: str) -> None:
    """torch rounds a pinned block up to a power of two by default: a 7B's offloaded shards take 162 GiB for 85."""
    seen: list[str | None] = []

    class Rank(RankActor[Any]):
        shares_device_memory = shares

        def _load(self, address: str) -> None:
            seen.append(os.environ.get(ALLOCATOR))

    monkeypatch.setenv(ALLOCATOR, "")  # put back at the end
    monkeypatch.delenv(ALLOCATOR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("rlhfless.functions.ranks.require_cuda", lambda: None)
    rank = Rank(SimpleNamespace(rank_bindings=(DeviceBinding(kind, ("0",), exclusive=False),)), 0)
    rank.start("file:///there", True)
    assert seen == [expected]
    if expected:  # an unknown key would end the process at its first allocation
        torch._C._accelerator_setAllocatorSettings(expected)
