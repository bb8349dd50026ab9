"""The level of a prompt's log lengths, from samples that may be censored ("at least"). Pure.

Log lengths are normal around the level m with the standard deviation s, and m is normal around its prior. A known
length pulls m towards itself. A sample that is longer than t tokens pulls m up: with z = (log t - m) / s and the
inverse Mills ratio k(z) = pdf(z) / P(Z > z), it pulls by k / s, and weighs k (k - z), in 0..1, of a known length. The
weight is near 0 for a sample that has only just started, and near 1 for one far beyond its prompt's level. The log
posterior is concave: Newton's method finds its peak, and the curvature there is used as the posterior's precision
(Laplace's approximation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

QUANTILE_LEVELS: Array = np.array([0.01, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999])
"""Q levels, the same in every forecast. The upper ones are needed because the longest sample of a batch determines
its end."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of a step at one moment, ordered by prompt.

    Raises ValueError for a duplicate prompt.
    """

    prompt_ids: tuple[str, ...]  # [prompts]
    prompt: npt.NDArray[np.integer]  # [samples], ascending: index into prompt_ids
    tokens: npt.NDArray[np.integer] | Array  # [samples]: generated so far
    ended: BoolArray  # [samples]
    truncated: BoolArray
    """[samples]: whether a sample was stopped externally, as at max_tokens; by itself it would be longer."""

    def __post_init__(self) -> None:
        if len(set(self.prompt_ids)) < len(self.prompt_ids):
            twice = next(name for name in self.prompt_ids if self.prompt_ids.count(name) > 1)
            raise ValueError(f"prompt {twice!r} comes twice in one step; give the samples of a prompt together")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The remaining tokens of a step's unfinished samples, as quantiles."""

    rows: Ints  # [unfinished], ascending: rows of StepSamples
    kind: Ints
    """[unfinished], ascending: row of `table`. Siblings with the same number of tokens so far are of one kind."""
    kind_tokens: Array  # [kinds]: generated so far
    table: Array
    """[kinds, Q]: remaining tokens, ascending along Q, at least 1 and at most up to max_tokens."""

    @property
    def mean_tokens(self) -> Array:
        """Return the mean remaining tokens [unfinished]."""
        return np.asarray((self.table @ mean_weights(QUANTILE_LEVELS))[self.kind])

    @property
    def total_tokens(self) -> Array:
        """Return the tokens of the whole response [unfinished, Q]."""
        return np.asarray((self.table + self.kind_tokens[:, None])[self.kind])


def mean_weights(levels: Array) -> Array:
    """Return the weights [Q] that turn quantiles into a mean.

    This is the trapezoid rule, with the outermost quantiles extended to 0 and 1.
    """
    return np.diff(np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]]))


def runs(*columns: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """Return the run of each row [rows], and the first row of each run [runs].

    A run is a group of adjacent rows that are equal in all columns [rows].
    """
    begins = np.ones(columns[0].size, np.bool_)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


NEWTON_STEPS = 3
"""Steps of Newton's method, starting at the peak without the samples of unknown length. Those samples only raise it,
by a pull that is convex in the level, so the method approaches the peak from below and never passes it. With 2
steps, forecasts at half time lose 0.1 % (pinball loss), with 1 step 2 %.
"""

# The standard normal distribution as a table, because numpy has no error function. Beyond its upper end it is constant:
# no length is far enough above its prompt's level for this to matter.
_Z: Array = np.linspace(-8.0, 30.0, 3801)
_SURVIVAL: Array = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in _Z.tolist()])
_HAZARD: Array = -np.log(_SURVIVAL)
_MILLS: Array = np.exp(-(_Z**2) / 2) / math.sqrt(2 * math.pi) / _SURVIVAL


class Levels(NamedTuple):
    """The normal distributions of the levels of prompts, in log tokens."""

    mean: Array  # [prompts]
    variance: Array  # [prompts]


class Evidence(NamedTuple):
    """Observed lengths of a step's samples; identical siblings share an entry."""

    prompt: npt.NDArray[np.integer]  # [entries]
    log_tokens: Array  # [entries]: log of the length, or of the least length
    known: BoolArray  # [entries]: whether it is the length
    number: Array  # [entries]: number of samples

    def sums(self, of_one: Array | float, prompts: int) -> Array:
        """Return the sum over samples [prompts] of a per-sample figure [entries]."""
        return np.bincount(self.prompt, of_one * self.number, minlength=prompts).astype(np.float64, copy=False)

    def where(self, entries: BoolArray) -> Evidence:
        """Return the selected entries."""
        return Evidence(self.prompt[entries], self.log_tokens[entries], self.known[entries], self.number[entries])


def evidence_of(samples: StepSamples) -> tuple[Evidence, Ints, Ints]:
    """Return the evidence, the entry of each sample [samples], and the first sample of each entry [entries].

    A running sample will have at least one more token.
    """
    entry, first = runs(samples.prompt, samples.tokens, samples.ended, samples.truncated)
    ended = samples.ended[first]
    log_tokens = np.log(np.maximum(samples.tokens[first] + ~ended, 1.0))
    known = ended & ~samples.truncated[first]
    return Evidence(samples.prompt[first], log_tokens, known, np.bincount(entry).astype(np.float64)), entry, first


def update(prior: Levels, spread: float, evidence: Evidence) -> Levels:
    """Return the levels [prompts] after the evidence; `spread` is s."""
    prompts, known, longer = prior.mean.size, evidence.where(evidence.known), evidence.where(~evidence.known)
    weight = 1 / prior.variance + known.sums(spread**-2, prompts)
    pull = prior.mean / prior.variance + known.sums(known.log_tokens * spread**-2, prompts)
    mean, precision = pull / weight, weight
    for _ in range(NEWTON_STEPS):
        z = (longer.log_tokens - mean[longer.prompt]) / spread
        ratio = inverse_mills(z)
        precision = weight + longer.sums(np.clip(ratio * (ratio - z), 0.0, 1.0) * spread**-2, prompts)
        mean = mean + (pull - weight * mean + longer.sums(ratio / spread, prompts)) / precision
    return Levels(mean, 1 / precision)


def moments(level: Array, spread: float, evidence: Evidence) -> tuple[Array, Array]:
    """Return the means [entries] of log lengths, and of their squared distances from the prompts' levels [prompts]."""
    away = evidence.log_tokens - level[evidence.prompt]
    lift = inverse_mills(away / spread) * spread
    mean = np.where(evidence.known, evidence.log_tokens, level[evidence.prompt] + lift)
    return mean, np.where(evidence.known, away**2, spread**2 + away * lift)


def inverse_mills(z: Array) -> Array:
    """Return pdf(z) / P(Z > z) of the standard normal, for any shape: the mean of Z given Z > z."""
    return np.interp(z, _Z, _MILLS)


def quantiles_beyond(z: Array, levels: Array) -> Array:
    """Return the quantiles [rows, Q] of a standard normal Z at `levels` [Q], given that Z > z [rows]."""
    return np.asarray(np.interp(np.interp(z, _Z, _HAZARD)[:, None] - np.log1p(-levels), _HAZARD, _Z))
