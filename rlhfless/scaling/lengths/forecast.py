"""Samples of a step at one moment, and forecasts of their remaining tokens."""

from __future__ import annotations

from dataclasses import dataclass

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
