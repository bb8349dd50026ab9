"""An engine of several processes whose caller is killed, or whose weights cannot be read."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fakes.tiny_models import make_tiny_model, tiny_settings
from rlhfless.functions.devices import cuda_fault, engine_fault
from rlhfless.functions.generation.engine import EngineDead
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.spec import EngineSpec
from rlhfless.weights.store import FolderStore

FRONT = Path(__file__).with_name("engine_process.py")
GONE_S = 60.0


@pytest.mark.engine
@pytest.mark.long
def test_nothing_is_left_of_an_engine_whose_caller_is_killed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tied=True)
    store = FolderStore(tmp_path / "store")
    published = model.publish(store.put("run", 1, 1, model.tensors()))
    (Path(published.location) / "0").write_bytes(b"torn")
    command = [sys.executable, str(FRONT), str(tmp_path), published.location]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert front.stdout is not None
        pids, said = front.stdout.readline(), front.stdout.readline()
    finally:
        front.kill()
        front.wait()
    processes = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert len(processes) >= 3  # the front end, the core, the worker
    assert said.startswith("WeightFileError"), said  # though another process read the file

    end_s = time.monotonic() + GONE_S
    while left := [process for process in processes if _runs(process)]:
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.engine
@pytest.mark.long
async def test_a_kv_cache_that_is_too_small_is_called_so(tmp_path: Path) -> None:
    """In vLLM's words, which the next release may change, and which only the log of its core has."""
    model = make_tiny_model(tmp_path / "model", tied=True)
    settings = tiny_settings(model, tmp_path, EngineSpec(kv_cache_gib=1e-5, max_sequences=4, core_process=True))
    with pytest.raises(EngineDead) as ended:
        await VllmEngine.start(settings)
    told = engine_fault(str(ended.value), {"generate": 3 << 28})
    assert told is not None
    assert str(told).startswith("generation ran out of memory in `generate` (the memory plan counts 0.75 GiB for it): ")
    assert "cache" in str(told).partition("): ")[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
async def test_an_engine_that_was_given_a_gpu_does_not_start_on_cpus(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tied=True)
    settings = dataclasses.replace(tiny_settings(model, tmp_path, EngineSpec(max_sequences=4)), device="cuda")
    with pytest.raises(EngineDead) as ended:
        await VllmEngine.start(settings)
    assert str(cuda_fault(str(ended.value))).startswith("no CUDA on ")
