"""A KL coefficient that follows a target (arXiv 1909.08593, section 2.2), a pure function of the step before.

error = clip(KL / target - 1, -0.2, 0.2)        next = coefficient * (1 + error * min(samples / horizon, 1))
"""

from __future__ import annotations

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import old_kl_to_reference
from rlhfless.spec import AlgorithmSpec, RewardKLSpec

MAX_ERROR = 0.2
"""As published: a step whose KL is far off changes the coefficient little."""


def next_coefficient(coefficient: float, measured_kl: float, target: float, *, samples: int, horizon: int) -> float:
    """The coefficient of the next step, from the KL per token of this one, over `samples` samples."""
    error = min(max(measured_kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * min(samples / horizon, 1.0))


def adaptive_kl_of(settings: AlgorithmSpec) -> RewardKLSpec | None:
    """The settings of the KL if its coefficient follows a target."""
    kl = getattr(settings, "kl", None)
    return kl if isinstance(kl, RewardKLSpec) and kl.target is not None else None


def after_step(settings: AlgorithmSpec, batch: PackedBatch) -> AlgorithmSpec:
    """The settings for the step after one that learned from `batch`; the same if nothing in them follows a target."""
    kl = adaptive_kl_of(settings)
    if kl is None or kl.target is None or not batch.denominators.tokens:
        return settings
    measured = float(old_kl_to_reference(batch, kl.estimator).mean())
    samples = batch.denominators.sequences
    following = next_coefficient(kl.coefficient, measured, kl.target, samples=samples, horizon=kl.horizon)
    return with_coefficient(settings, following)


def with_coefficient(settings: AlgorithmSpec, coefficient: float) -> AlgorithmSpec:
    """The settings with another KL coefficient; the same if it follows no target."""
    kl = adaptive_kl_of(settings)
    if kl is None:
        return settings
    return settings.model_copy(update={"kl": kl.model_copy(update={"coefficient": coefficient})})
