"""The sleep of a worker on a CPU, with a runner of ours."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

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
