"""An exponential moving average of a model's weights, in shards as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rlhfless.functions.sharding import local


class WeightAverage:
    """The average a of the weights w after each optimiser step: a <- d a + (1 - d) w, in float32, with the decay d. It
    begins with the initial weights (Polyak and Juditsky, 1992, average them with equal weights; the exponential form is
    that of Mean Teacher, arXiv 1703.01780)."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.tensors: Mapping[str, torch.Tensor] = {name: weight.clone() for name, weight in self._weights.items()}
        """By parameter, split as it is."""

    def update(self) -> None:
        """Take in the weights as they are after an optimiser step."""
        for average, weights in self._pairs():
            average.lerp_(weights, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the weights are those of the average, and the average has the weights: both change places,
        so that nothing is held twice, and come back bit for bit."""
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
        """This rank's parts of average and weights."""
        for name, weights in self._weights.items():
            yield local(self.tensors[name]), local(weights)
