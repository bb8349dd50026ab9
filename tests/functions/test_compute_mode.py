"""GPUs that take one process alone are found before a function that shares one starts. nvidia-smi is a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless.functions import devices
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.devices import GpuNotShared, require_shareable
from rlhfless.functions.launching import is_shared
from rlhfless.functions.ranks import RankActor
from rlhfless.scaling.placement import Allocation, Device

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
