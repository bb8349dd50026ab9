"""Sleep mode for vLLM workers on CPUs; vLLM supports it only on GPUs, and otherwise just logs the request.

The parts match vLLM's: the KV cache is released in every tier, the weights when they are dropped. A load fills the
tensors that layers compute with. Linear layers compute with packed copies inside closures (`cpu_linear`), which
vLLM's reload recreates. Buffers, such as tables of rotary embeddings, are in no version and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform

from rlhfless.functions.host_offload import empty, give_back_free_memory, held_bytes, require_free, storages_of

PACKED = "cpu_linear"


class SleepingWorker:
    """Mixin for vLLM's worker, called through `collective_rpc`."""

    def rlhfless_held_bytes(self) -> int:
        return held_bytes(torch.device("cpu") if current_platform.is_cpu() else self.device)  # type: ignore[attr-defined]

    def rlhfless_require_free(self, size_bytes: int) -> None:
        """Raise MemoryError if the worker's GPU has less free memory: another function still holds it."""
        require_free(self.device, size_bytes)  # type: ignore[attr-defined]

    def rlhfless_release_host_memory(self) -> None:
        """Unpin the host memory of sleeping weights, which torch would keep for the process's lifetime."""
        torch._C._host_emptyCache()

    def rlhfless_sleep(self, drop: bool) -> None:
        """Release the memory of the KV cache and, with `drop`, of the weights.

        It comes back as zeros when touched, so there is nothing to wake.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        empty(storages_of(_tensors(runner.kv_caches)))
        if drop:
            for module in runner.model.modules():
                if PACKED in module.__dict__:
                    setattr(module, PACKED, None)
            empty(storages_of(runner.model.parameters()))
        give_back_free_memory()


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of all layers; a layer may have several."""
    for cache in caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)
