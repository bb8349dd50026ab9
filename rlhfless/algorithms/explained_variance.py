"""The explained variance of a critic: 1 - Var(R - V) / Var(R), of the values V that the advantages were computed from.

1 is a critic that knows every return, 0 one that knows their mean. A variance does not add up over micro-batches, but
its parts, which are token means, do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlhfless.algorithms.base import ValueInputs

EXPLAINED_VARIANCE = "explained_variance"

_RETURN, _RETURN_SQUARE, _ERROR, _ERROR_SQUARE = PARTS = (
    "return",
    "return_square",
    "value_error",
    "value_error_square",
)
"""Names of the parts; telemetry has only what `with_explained_variance` makes of them."""


def explained_variance_parts(inputs: ValueInputs) -> dict[str, torch.Tensor]:
    """The micro-batch's share of each part, `[]`, in float64: variances are small differences of them."""
    returns = inputs.returns.detach().double()
    errors = returns - inputs.old_values.detach().double()
    parts = (returns, returns.square(), errors, errors.square())
    return {name: part.sum() * inputs.scale for name, part in zip(PARTS, parts, strict=True)}


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, with the explained variance in place of its parts; without it if all returns are equal,
    which no critic explains."""
    kept = {name: value for name, value in metrics.items() if name not in PARTS}
    if not metrics.keys() >= set(PARTS):
        return kept
    variance = metrics[_RETURN_SQUARE] - metrics[_RETURN] ** 2
    unexplained = metrics[_ERROR_SQUARE] - metrics[_ERROR] ** 2
    if variance <= 1e-12 * metrics[_RETURN_SQUARE]:  # rounding
        return kept
    return kept | {EXPLAINED_VARIANCE: 1 - max(unexplained, 0.0) / variance}
