"""The sleep of a vLLM worker on CPUs, which vLLM has for GPUs alone: there it only logs that it is asked.

The same two parts as vLLM's own: the KV cache goes in each tier, the weights when they are dropped; both come back
empty, at the addresses' own tensors, so that a load fills what layers compute with. Linear layers compute with packed
copies that live in closures (`cpu_linear`); vLLM's reload makes them again. Buffers, such as tables of rotary
embeddings, are in no version, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform

from rlhfless.functions.parking import give_back_free_memory, held_bytes, storages_of

PACKED = "cpu_linear"

Emptied = list[tuple[torch.UntypedStorage, int]]
"""Storages and the bytes that they had."""


class SleepingWorker:
    """Mixed into vLLM's worker, for `collective_rpc`."""

    _weights: Emptied
    _kv: Emptied

    def rlhfless_held_bytes(self) -> int:
        """See held_bytes."""
        return held_bytes(torch.device("cpu") if current_platform.is_cpu() else self.device)  # type: ignore[attr-defined]

    def rlhfless_sleep(self, drop: bool) -> None:
        """Give up the memory of the KV cache, and if `drop` of the weights."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._kv = _emptied(_tensors(runner.kv_caches))
        self._weights = []
        if drop:
            for module in runner.model.modules():
                if PACKED in module.__dict__:
                    setattr(module, PACKED, None)
            self._weights = _emptied(runner.model.parameters())
        give_back_free_memory()

    def rlhfless_wake_weights(self) -> None:
        """Memory for weights, without any."""
        for storage, size in self._weights:
            storage.resize_(size)
        self._weights = []

    def rlhfless_wake_kv(self) -> None:
        """An empty cache. Zeros, as vLLM makes it: attention multiplies what lies behind a block's last token by 0."""
        for storage, size in self._kv:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()  # type: ignore[call-overload]
        self._kv = []


def _emptied(tensors: Iterable[torch.Tensor]) -> Emptied:
    emptied = [(storage, storage.nbytes()) for storage in storages_of(tensors)]
    for storage, _ in emptied:
        storage.resize_(0)
    return emptied


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Of all layers; a layer may have several."""
    for cache in caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)
