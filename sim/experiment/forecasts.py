"""How well response lengths were forecast before each step of a run, from all earlier steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths import QUANTILE_LEVELS, LengthPredictor, StepSamples
from rlhfless.scaling.lengths.quality import spearman
from rlhfless.sim.samples import RolloutBatch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthForecasts:
    """Every response after the first step."""

    expected_tokens: Floats  # [samples]
    real_tokens: Floats  # [samples]
    coverage: Floats
    """[Q]: share of responses at or below each quantile of QUANTILE_LEVELS; equal to them if forecasts are honest."""
    rank_correlation: float | None
    """Spearman's within a step, averaged over the steps."""
    mean_error: float
    """Mean of |expected - real| by the mean response."""
    mean_error_of_mean: float
    """The same for a forecast that is always the mean of the run so far."""


def length_forecasts(batches: Sequence[RolloutBatch], max_tokens: int) -> LengthForecasts:
    """Walks forward through a run's batches. Raises ValueError for fewer than two."""
    if len(batches) < 2:
        raise ValueError(f"{len(batches)} steps; forecasts need 2, one to learn from")
    predictor = LengthPredictor(max_tokens)
    expected: list[Floats] = []
    of_mean: list[Floats] = []
    seen: list[Floats] = []
    ranks: list[float] = []
    covered = np.zeros(len(QUANTILE_LEVELS))
    for index, batch in enumerate(batches):
        tokens = batch.response_tokens.astype(np.float64)
        if index:
            none = np.zeros(batch.samples, np.bool_)
            forecast = predictor.forecast(StepSamples(batch.prompt_ids, batch.group, np.zeros_like(tokens), none, none))
            expected.append(forecast.mean_tokens)
            of_mean.append(np.abs(np.concatenate(seen).mean() - tokens))
            covered += (tokens[:, None] <= forecast.total_tokens).sum(axis=0)
            rank = spearman(forecast.mean_tokens, tokens)
            ranks += [] if rank is None else [rank]
        seen.append(tokens)
        ended = np.ones(batch.samples, np.bool_)
        predictor.learn(StepSamples(batch.prompt_ids, batch.group, tokens, ended, tokens >= max_tokens))
    guesses, lengths = np.concatenate(expected), np.concatenate(seen[1:])
    return LengthForecasts(
        guesses,
        lengths,
        covered / len(lengths),
        float(np.mean(ranks)) if ranks else None,
        float(np.abs(guesses - lengths).mean() / lengths.mean()),
        float(np.concatenate(of_mean).mean() / lengths.mean()),
    )
