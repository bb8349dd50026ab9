"""Quality measures of forecasts, given the actual lengths. Pure."""

from __future__ import annotations

import numpy as np

from rlhfless.scaling.lengths.forecast import QUANTILE_LEVELS, Array


def pinball(quantiles: Array, real: Array) -> Array:
    """Return the pinball loss [samples, Q] of quantiles [samples, Q] at QUANTILE_LEVELS, given `real` [samples]."""
    above = real[:, None] - quantiles
    return np.maximum(QUANTILE_LEVELS * above, (QUANTILE_LEVELS - 1) * above)


def spearman(first: Array, second: Array) -> float | None:
    """Return Spearman's rank correlation, with ties at their mean rank, or None if either is constant."""
    one, two = _ranks(first), _ranks(second)
    spread = float(np.sqrt(one.var() * two.var()))
    return float(((one - one.mean()) * (two - two.mean())).mean()) / spread if spread > 0 else None


def _ranks(values: Array) -> Array:
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[inverse])
