"""The level of a prompt's response lengths, from samples of which some are only "at least": an update in log space.
Pure.

Log lengths of one prompt are normal around its level m with spread s, and m itself is normal around its prior. A
finished sample pulls m towards itself. A sample still running after t tokens, or cut off at t, shows that its length is
larger: with z = (log t - m) / s and the inverse Mills ratio k(z) = pdf(z) / P(Z > z), it pulls with k / s, and weighs k
(k - z) in 0..1 of a finished one. The weight is near 0 for a sample that has hardly begun, and near 1 for one far
beyond its prompt's level. The log posterior is concave: Newton's method finds its peak, and the curvature there is
taken as the posterior's precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.lengths import kernel
from rlhfless.scaling.lengths.samples import Array, Samples

NEWTON_STEPS = 4
"""Steps of Newton's method from the peak of the prior and the finished samples, which is exact. Samples of which only
"at least" is known can only lift it, by a pull that is convex in the level: the method climbs to the peak from below
and never past it, so evidence of a long response never lowers a level. After these steps the error is below a hundredth
of the spread."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The normal distributions of levels: log tokens."""

    mean: Array  # [...]
    variance: Array  # [...]


def mills(z: Array) -> Array:
    """Inverse Mills ratio pdf(z) / P(Z > z) of the standard normal [values]: by how much Z > z moves the mean of Z."""
    ratio = np.empty(z.size)
    kernel.ratios(z, _MILLS, ratio)
    return ratio


def update(prior: Levels, spread: Array, samples: Samples) -> Levels:
    """The levels [prompts] after the samples; `spread` [prompts] is the sd of one sample around its level."""
    mean, precision, pull = np.empty((3, spread.size))
    kernel.climb(prior.mean, 1 / prior.variance, spread, samples, _MILLS, NEWTON_STEPS, mean, precision, pull)
    return Levels(mean, 1 / precision)


def without_each(levels: Levels, spread: Array, samples: Samples) -> Levels:
    """For each sample the level [entries] by the evidence of all *other* samples, by one Newton step.

    A forecast of a running sample is conditioned on its own tokens; those must not count twice.
    """
    mean, variance = np.empty((2, samples.prompt.size))
    kernel.leave_out(levels.mean, levels.variance, spread, samples, _MILLS, mean, variance)
    return Levels(mean, variance)


def squared_residuals(mean: Array, spread: Array, samples: Samples) -> Array:
    """Expected squared distance [entries] from the level; for a cut-off sample the expectation over its possible
    ends."""
    away, scale = samples.log_tokens - mean[samples.prompt], spread[samples.prompt]
    z = away / scale
    return np.where(samples.finished, away**2, scale**2 * (1 + z * mills(z)))


def _mills_of(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / (math.erfc(z / math.sqrt(2)) / 2)


# A table, because numpy has no error function. Beyond its upper end, where the ratio is z itself to a thousandth, it
# is held: no length is so many spreads above its prompt's level that it mattered.
_LOWEST_Z, _HIGHEST_Z, _Z_CELL = -8.0, 30.0, 0.01
_MILLS = kernel.Mills(_LOWEST_Z, _Z_CELL, np.array([_mills_of(z) for z in np.linspace(_LOWEST_Z, _HIGHEST_Z, 3801)]))
