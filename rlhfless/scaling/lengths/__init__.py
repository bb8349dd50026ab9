"""Forecasts of response lengths, as distributions, from the history of the run."""

from rlhfless.scaling.lengths.forecast import QUANTILE_LEVELS, Forecast
from rlhfless.scaling.lengths.predictor import LengthPredictor
from rlhfless.scaling.lengths.replay import predictor_of

__all__ = ["QUANTILE_LEVELS", "Forecast", "LengthPredictor", "predictor_of"]
