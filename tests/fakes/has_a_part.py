"""A stand-in for a rank that has handed its part of a state over."""

from __future__ import annotations

import numpy as np

from rlhfless.functions.training.actor import TrainingActor


class HasAPart:
    """The real methods, without a model."""

    handed_over, give, drop_handed_over = TrainingActor.handed_over, TrainingActor.give, TrainingActor.drop_handed_over
    _part_of = TrainingActor._part_of

    def __init__(self, node: str, folder: str, name: str, size_bytes: int) -> None:
        self._node_id = node
        part = self._part_of(folder) / "state"
        part.mkdir(parents=True)
        (part / name).write_bytes(np.random.default_rng(size_bytes).bytes(size_bytes))
