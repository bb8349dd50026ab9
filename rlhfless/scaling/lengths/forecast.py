"""The form of a forecast: remaining tokens at fixed quantile levels, for many samples at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths.samples import Array, BoolArray, Ints

QUANTILE_LEVELS: Array = np.array([0.01, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999])
"""Q levels, the same in every forecast. The upper ones are there because the longest of a batch decides its end."""


def mean_weights(levels: Array) -> Array:
    """Weights [Q] that make a mean of quantiles: the trapezoid rule, with the outermost quantiles held to 0 and 1."""
    middles = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    weights: Array = np.diff(middles)
    return weights


_MEAN_WEIGHTS = mean_weights(QUANTILE_LEVELS)


def runs(*columns: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """Rows that follow each other and are equal in all columns [rows] make a run: the run of each row [rows], and the
    first row of each run [runs]."""
    begins = np.ones(columns[0].size, np.bool_)
    begins[1:] = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        begins[1:] |= column[1:] != column[:-1]
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The unfinished samples of a step, by prompt and then by sample index."""

    prompt_ids: tuple[str, ...]
    """The prompts of the step, in its order."""
    sample: Ints  # [samples]: sample index
    kind: Ints
    """[samples]: row of `table`. Siblings that have drawn equally many tokens are one kind, and forecast once."""
    kind_prompt: Ints  # [kinds]: index into prompt_ids
    kind_tokens: Array  # [kinds]: drawn so far
    table: Array
    """[kinds, Q]: remaining tokens, ascending along Q: at least 1, and never beyond max_tokens."""

    @property
    def prompt(self) -> Ints:
        """[samples]: index into prompt_ids."""
        return self.kind_prompt[self.kind]

    @property
    def tokens(self) -> Array:
        """[samples]: tokens drawn so far."""
        return self.kind_tokens[self.kind]

    @property
    def remaining_tokens(self) -> Array:
        """[samples, Q]: see `table`."""
        return self.table[self.kind]

    @property
    def mean_tokens(self) -> Array:
        """[samples]: mean of the remaining tokens."""
        means: Array = (self.table @ _MEAN_WEIGHTS)[self.kind]
        return means

    @property
    def total_tokens(self) -> Array:
        """[samples, Q]: tokens of the whole response."""
        return self.remaining_tokens + self.tokens[:, None]

    def take(self, rows: BoolArray) -> Forecast:
        """Only these samples; `rows` [samples]."""
        return replace(self, sample=self.sample[rows], kind=self.kind[rows])

    def __len__(self) -> int:
        return len(self.sample)
