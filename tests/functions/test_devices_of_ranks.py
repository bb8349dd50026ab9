"""Faults of devices are named: no CUDA, a GPU for one process alone, and a lack of memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions import devices
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.devices import (
    ALLOCATOR,
    GIB,
    GpuNotShared,
    NoCuda,
    OutOfMemory,
    cuda_fault,
    engine_fault,
    naming_memory_errors,
    require_cuda,
    require_shareable,
)
from rlhfless.functions.launching import is_shared
from rlhfless.functions.ranks import RankActor
from rlhfless.scaling.placement import Allocation, Device

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


Smi = Callable[[str], Path]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Puts an nvidia-smi that runs these shell words first on the path; returns the file of what it was asked."""
    monkeypatch.setattr(devices, "MPS_FOLDER", str(tmp_path / "no-mps"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(words: str) -> Path:
        program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
        program.write_text(f'#!/bin/sh\necho "$@" > {asked}\n{words}\n')
        program.chmod(0o755)
        return asked

    return make


def test_a_gpu_for_one_process_is_refused_with_the_mend(smi: Smi) -> None:
    asked = smi("echo Default; echo Exclusive_Process")
    with pytest.raises(GpuNotShared, match=r"GPU 5 of .* mode Exclusive_Process.*`nvidia-smi -i 5 -c DEFAULT`"):
        require_shareable(["4", "5"])
    assert asked.read_text().split() == ["--id=4,5", "--query-gpu=compute_mode", "--format=csv,noheader"]


@pytest.mark.parametrize("words", ["echo Default", "echo no such device; exit 6"])
def test_others_are_not(smi: Smi, words: str) -> None:
    smi(words)
    require_shareable(["0"])


def test_the_multi_process_service_shares_them_in_any_mode(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("echo Exclusive_Process")
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    require_shareable(["0"])


@pytest.mark.parametrize(
    ("kind", "shared", "refused"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_only_a_function_that_shares_its_gpu_asks(smi: Smi, kind: str, shared: bool, refused: bool) -> None:
    smi("echo Exclusive_Process")
    binding = DeviceBinding(kind, ("0",), exclusive=False, shared=shared)
    if refused:
        with pytest.raises(GpuNotShared):
            binding.require_usable()
    else:
        binding.require_usable()


def test_what_is_shared() -> None:
    gpus = [Device(f"gpu-{i}", "h100", i) for i in range(2)]
    assert not is_shared(Allocation.of(gpus))
    assert not is_shared(Allocation.of(gpus), ranks=2)
    assert is_shared(Allocation.of(gpus), ranks=3)
    assert is_shared(Allocation(tuple(gpus), (1.0, 0.5)))


def test_a_rank_asks_before_it_joins_the_others(smi: Smi) -> None:
    smi("echo Exclusive_Process")
    rank = RankActor.__new__(RankActor)
    rank._settings = SimpleNamespace(rank_bindings=(DeviceBinding("cuda", ("0",), exclusive=False, shared=True),))
    rank._number = 0
    with pytest.raises(GpuNotShared):
        rank.start("tcp://127.0.0.1:1", False)


PLANNED = {"learn": 3 * GIB, "generate": GIB // 2}


def of_the_cpu() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)  # more than an address space has
    return raised.value


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(), of_the_cpu()]
)
def test_a_learner(error: Exception) -> None:
    with pytest.raises(OutOfMemory) as told, naming_memory_errors("learner rank 0", "learn", PLANNED):
        raise error
    assert str(told.value).startswith(
        "learner rank 0 ran out of memory in `learn` (the memory plan counts 3.00 GiB for it): "
    )
    assert "GiB were held at most; " in str(told.value)
    assert "`rlhfless plan`" in str(told.value)


def test_another_error_is_left_alone() -> None:
    with pytest.raises(ValueError, match="nothing to do with it"), naming_memory_errors("learner", "learn", {}):
        raise ValueError("nothing to do with it")


def test_an_engine_that_ended_for_another_reason() -> None:
    assert engine_fault("the engine's process failed:\nKeyError: 'no such layer'", PLANNED) is None
