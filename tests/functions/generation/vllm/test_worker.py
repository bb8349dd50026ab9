"""A worker's sleep on a CPU, with a runner of ours, and the phases of its start."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions.generation.vllm import start_times
from rlhfless.functions.generation.vllm.start_times import of_worker, phases

MIB = 2**20


@dataclass
class Packed:
    """As the closures in which vLLM keeps packed weights."""

    weight: torch.Tensor


def made_worker() -> Any:
    """Imported here: vLLM takes seconds, in each process that reads this file."""
    from rlhfless.functions.generation.vllm.weight_engine import StoreWorkerExtension

    layer = torch.nn.Linear(2048, 2048)
    layer.cpu_linear = Packed(layer.weight.detach().clone())  # type: ignore[assignment]
    caches = [torch.ones(8 * MIB), (torch.ones(4 * MIB), torch.ones(4 * MIB))]
    worker: Any = StoreWorkerExtension()
    worker.model_runner = SimpleNamespace(model=torch.nn.Sequential(layer), kv_caches=caches)
    return worker


def test_each_tier_gives_back_what_it_says() -> None:
    worker = made_worker()
    at_first = worker.rlhfless_held_bytes()
    worker.rlhfless_sleep(drop=False)
    without_kv = worker.rlhfless_held_bytes()
    assert at_first - without_kv >= 0.9 * 64 * MIB
    assert worker.model_runner.model[0].cpu_linear is not None
    worker.rlhfless_sleep(drop=True)
    assert without_kv - worker.rlhfless_held_bytes() >= 0.9 * 32 * MIB  # its parameter and its packed copy
    assert worker.model_runner.model[0].cpu_linear is None
    assert all(float(cache[4096:-4096].sum()) == 0 for cache in worker.model_runner.kv_caches[1])


def test_a_worker_reports_what_the_log_and_the_configuration_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_times, "_heard", start_times._Heard())
    log = logging.getLogger("vllm.v1.worker.some_runner")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    log.setLevel(logging.INFO)
    start_times.listen()
    log.info("Loading weights took %.2f seconds", 2.25)
    log.info("Loading drafter model took %.2f seconds", 9.0)
    log.info("Graph capturing finished in %.0f secs, took %.2f GiB", 7.5, 1.0)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(compilation_time=30.0, encoder_compilation_time=1.0), model="m"
    )
    assert of_worker(config)[0] == {"weights_cache": 2.25, "graphs": 7.5, "compile": 31.0}


def test_phases_are_of_the_slowest_worker_and_add_up_to_the_build() -> None:
    workers = [({"weights_cache": 2.0, "graphs": 7.0}, 40), ({"weights_cache": 3.0, "compile": 10.0}, 20)]
    assert phases(25.0, workers, 100) == {"weights_disk": 3.0, "graphs": 7.0, "compile": 10.0, "build": 5.0}
    assert phases(25.0, [({"weights_cache": 2.0}, 49)], 100) == {"weights_cache": 2.0, "build": 23.0}
    assert phases(25.0, [({}, 0)], 0) == {"build": 25.0}
