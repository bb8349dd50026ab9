"""The optimiser steps of a training step: passes over its batch (epochs), each cut into mini-batches.

Several passes draw more from samples that were expensive to generate (arXiv 1707.06347, algorithm 1, has K epochs).
The groups of each pass are in an order of its own, which depends only on the seed: a step that is done again, or
resumed, has the same mini-batches.

A batch of one optimiser step may also come in parts, whose gradients are added up before the last of it is drawn (Part,
LastParts). What a loss is divided by is known at the end, so they are sums until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlhfless.algorithms.batch import Denominators, PackedBatch, mini_batches


@dataclass(frozen=True, slots=True)
class Passes:
    """How one function passes over the batch of one training step."""

    mini_batches: int = 1
    """Optimiser steps of each pass."""
    epochs: int = 1
    seed: tuple[int, ...] = (0,)
    """Numbers of the run and of the step, from which the order of each pass is drawn."""
    planned_updates: int = 0
    """Optimiser steps of the whole run, over which the learning rate may fall."""

    @property
    def updates(self) -> int:
        """Optimiser steps of the training step."""
        return self.mini_batches * self.epochs

    def over(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """The mini-batches of all passes, one after the other, each the data of an optimiser step. Raises ValueError as
        `mini_batches` does."""
        for epoch in range(self.epochs):
            order = np.random.default_rng([number % 2**64 for number in (*self.seed, epoch)])
            yield from mini_batches(batch, self.mini_batches, order.permutation(batch.groups))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the batch of a step, of whole groups."""

    tried: str
    """Which try of the step it is of: another try has parts of its own, from the first on."""
    number: int
    """From 0."""
    batch: PackedBatch


@dataclass(frozen=True, slots=True)
class LastParts:
    """The parts of a step that were not sent before, with which its batch is complete."""

    tried: str
    sent: int
    """How many parts came before these."""
    batches: tuple[PackedBatch, ...]
    whole: Denominators
    """Of all parts together."""
    planned_updates: int
    """See Passes."""
