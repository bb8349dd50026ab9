"""The settings that every function with a trained model has."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.functions.base import RankedSettings
from rlhfless.spec import AdamWSpec, AlgorithmSpec, ModelSpec, TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSettings(RankedSettings):
    """The settings of a replica."""

    model: ModelSpec
    training: TrainingSpec
    optimizer: AdamWSpec
    algorithm: AlgorithmSpec
