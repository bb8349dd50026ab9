"""The optimizer steps of a training step: passes over its batch (epochs), each divided into mini-batches.

Several passes learn more from samples that were expensive to generate (arXiv 1707.06347, algorithm 1, has K epochs).
Each pass has its own order of groups, which depends only on the seed, so a repeated or resumed step has the same
mini-batches. The learning rate of each step follows from the spec and its number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlhfless.algorithms.batch import PackedBatch, own_denominators, select
from rlhfless.records import IntArray
from rlhfless.spec import AdamWSpec


def mini_batches(batch: PackedBatch, count: int, order: IntArray) -> tuple[PackedBatch, ...]:
    """Divide a batch into `count` mini-batches of whole groups, in the given `order` [groups].

    Group counts differ by at most one. Each mini-batch is the data of one optimizer step with its own denominators.
    Raises ValueError if there are fewer groups than mini-batches.
    """
    if count == 1:
        return (batch,)
    groups = batch.sequence_groups
    if not 1 <= count <= batch.groups:
        raise ValueError(f"cannot cut {batch.groups} groups into {count} mini-batches of whole groups")
    parts = np.array_split(order, count)
    return tuple(own_denominators(select(batch, np.flatnonzero(np.isin(groups, part)))) for part in parts)


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a function over a training step's batch."""

    mini_batches: int = 1
    """Optimizer steps per pass."""
    epochs: int = 1
    seed: tuple[int, ...] = (0,)
    """Numbers of the run and the step that seed the order of each pass."""
    planned_updates: int = 0
    """Optimizer steps of the whole run, the horizon of the learning rate schedule."""

    @property
    def updates(self) -> int:
        """Optimizer steps per training step."""
        return self.mini_batches * self.epochs

    def over(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """Yield the mini-batches of all passes. Raises ValueError if there are fewer groups than mini-batches."""
        for epoch in range(self.epochs):
            order = np.random.default_rng([number % 2**64 for number in (*self.seed, epoch)])
            yield from mini_batches(batch, self.mini_batches, order.permutation(batch.groups))


def learning_rate(spec: AdamWSpec, update: int, planned: int) -> float:
    """Return the learning rate of an update, counted from 1, in a run of `planned` updates.

    It grows linearly over `warmup_steps` W. From then on, with p = (update - 1 - W) / (planned - W) in [0, 1] and the
    floor f, it is the learning rate times 1 (`constant`), f + (1 - f) (1 - p) (`linear`), or
    f + (1 - f) (1 + cos(pi p)) / 2 (`cosine`; Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts).
    """
    if update <= spec.warmup_steps:
        return spec.learning_rate * update / spec.warmup_steps
    progress = min((update - 1 - spec.warmup_steps) / max(planned - spec.warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
        spec.rate_schedule
    ]
    floor = spec.rate_floor if spec.rate_schedule != "constant" else 1.0
    return spec.learning_rate * (floor + (1 - floor) * left)
