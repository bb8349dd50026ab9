"""Exponential moving average of a model's sharded weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rlhfless.functions.sharding import local


class WeightAverage:
    """Updates a <- d a + (1 - d) w after each optimiser step, in float32, starting from the initial weights.

    Mean Teacher, arXiv 1703.01780.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.tensors: Mapping[str, torch.Tensor] = {name: weight.clone() for name, weight in self._weights.items()}
        """Averages by parameter, sharded like the parameters."""

    def update(self) -> None:
        """Add the current weights. Call after each optimiser step."""
        for average, weights in self._pairs():
            average.lerp_(weights, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap weights and average within the block. Both return bitwise, without a second copy of all weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, weights in self._pairs():
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's shards of average and weights."""
        for name, weights in self._weights.items():
            yield local(self.tensors[name]), local(weights)
