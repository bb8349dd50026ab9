"""How long a prompt's responses are, from samples of which some are only "at least": an update in log space. Pure.

Log lengths of one prompt are normal around its level m with spread s, and m itself is normal around what was believed
before. A finished sample pulls m towards itself. A sample still running after t tokens, or cut off at t, says that its
length is larger: with z = (log t - m) / s and the inverse Mills ratio k(z) = pdf(z) / P(Z > z), it pulls with k / s,
and weighs k (k - z) in 0..1 of a finished one. Nothing for a sample that has hardly begun, nearly all for one far
beyond its prompt's level. The log posterior is concave: Newton's method finds its peak, and the curvature there is
taken as the posterior's precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.lengths.hazard import Array, BoolArray, Ints

NEWTON_STEPS = 4
"""From the peak that the prior and the finished samples have together, which is exact. Samples of which only "at least"
is known can only lift it, by a pull that is convex in the level: Newton's method climbs to the peak from below and
never past it, so evidence of a long response never lowers a level. Met to a hundredth of the spread by then."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of prompts, as evidence. Those of a prompt that are known to be longer than a length are alike, and those
    whose lengths are known count as so many with the mean of their logs."""

    prompt: Ints  # [entries]: whose they are
    log_tokens: Array  # [entries]: log of the length, or of the tokens so far
    finished: BoolArray  # [entries]: whether the length is known, or it is at least that
    count: Array  # [entries]: how many there are

    def sums(self, of_one: Array | BoolArray | float, prompts: int) -> Array:
        """[prompts]: the sum over all samples of a figure [entries] of one."""
        return np.bincount(self.prompt, of_one * self.count, minlength=prompts).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Levels:
    """The normal distributions of levels: log tokens."""

    mean: Array  # [...]
    variance: Array  # [...]


def mills(z: Array) -> Array:
    """Inverse Mills ratio pdf(z) / P(Z > z) of the standard normal: by how much Z > z moves the mean of Z."""
    place = np.minimum(np.maximum((z - _LOWEST_Z) / _Z_CELL, 0.0), len(_MILLS) - 1.5)
    cell = place.astype(np.intp)
    low = _MILLS[cell]
    result: Array = low + (place - cell) * (_MILLS[cell + 1] - low)
    return result


def update(prior: Levels, spread: Array, samples: Samples) -> Levels:
    """The levels [prompts] after the samples; `spread` [prompts] is the sd of one sample around its level."""
    prompts, believed, finished = spread.size, 1 / prior.variance, samples.finished / spread[samples.prompt] ** 2
    weights = believed + samples.sums(finished, prompts)
    mean = (prior.mean * believed + samples.sums(finished * samples.log_tokens, prompts)) / weights
    for _ in range(NEWTON_STEPS):
        pull, weight = _evidence(mean, spread, samples)
        precision = believed + samples.sums(weight, prompts)
        mean += ((prior.mean - mean) * believed + samples.sums(pull, prompts)) / precision
    _, weight = _evidence(mean, spread, samples)
    return Levels(mean, 1 / (believed + samples.sums(weight, prompts)))


def without_each(levels: Levels, spread: Array, samples: Samples) -> Levels:
    """For each sample the level [entries] that all *others* speak for, by one Newton step.

    A forecast of a running sample is conditioned on its own tokens; those must not count twice.
    """
    pull, weight = _evidence(levels.mean, spread, samples)
    there = samples.count > 0
    precision = 1 / levels.variance[samples.prompt] - weight * there
    return Levels(levels.mean[samples.prompt] - pull * there / precision, 1 / precision)


def squared_residuals(mean: Array, spread: Array, samples: Samples) -> Array:
    """Expected squared distance [entries] from the level; for a cut-off sample that of where it may end."""
    away, scale = samples.log_tokens - mean[samples.prompt], spread[samples.prompt]
    z = away / scale
    return np.where(samples.finished, away**2, scale**2 * (1 + z * mills(z)))


def _evidence(mean: Array, spread: Array, samples: Samples) -> tuple[Array, Array]:
    """First derivative, and minus the second, of one sample's log likelihood in its prompt's level."""
    scale = spread[samples.prompt]
    z = (samples.log_tokens - mean[samples.prompt]) / scale
    ratio = mills(z)
    pull = np.where(samples.finished, z, ratio) / scale
    weight = np.where(samples.finished, 1.0, np.minimum(np.maximum(ratio * (ratio - z), 0.0), 1.0)) / scale**2
    return pull, weight


def _mills_of(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / (math.erfc(z / math.sqrt(2)) / 2)


# A table, because numpy has no error function. Beyond its upper end, where the ratio is z itself to a thousandth, it
# is held: no length is so many spreads above its prompt's level that it mattered.
_LOWEST_Z, _HIGHEST_Z, _Z_CELL = -8.0, 30.0, 0.01
_MILLS = np.array([_mills_of(z) for z in np.linspace(_LOWEST_Z, _HIGHEST_Z, 3801)])
