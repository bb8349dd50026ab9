"""The sleep of a vLLM worker on CPUs, which vLLM has for GPUs alone: there it only logs that it is asked.

The same two parts as vLLM's own: the KV cache goes in each tier, the weights when they are dropped. A load fills the
tensors that layers compute with. Linear layers compute with packed
copies that live in closures (`cpu_linear`); vLLM's reload makes them again. Buffers, such as
tables of rotary embeddings, are in no version, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform

from rlhfless.functions.host_offload import empty, give_back_free_memory, held_bytes, require_free, storages_of

PACKED = "cpu_linear"


class SleepingWorker:
    """Mixed into vLLM's worker, for `collective_rpc`."""

    def rlhfless_held_bytes(self) -> int:
        """See held_bytes."""
        return held_bytes(torch.device("cpu") if current_platform.is_cpu() else self.device)  # type: ignore[attr-defined]

    def rlhfless_require_free(self, size_bytes: int) -> None:
        """Raises MemoryError if the worker's GPU has less than that free: another function still holds it."""
        require_free(self.device, size_bytes)  # type: ignore[attr-defined]

    def rlhfless_release_host_memory(self) -> None:
        """Unpin the host memory in which weights slept: torch would keep it for the life of the process."""
        torch._C._host_emptyCache()

    def rlhfless_sleep(self, drop: bool) -> None:
        """Give up the memory of the KV cache, and if `drop` of the weights. It comes back as zeros when it is touched:
        there is nothing to wake."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        empty(storages_of(_tensors(runner.kv_caches)))
        if drop:
            for module in runner.model.modules():
                if PACKED in module.__dict__:
                    setattr(module, PACKED, None)
            empty(storages_of(runner.model.parameters()))
        give_back_free_memory()


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of all layers; a layer may have several."""
    for cache in caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)
