"""Forecasts of response lengths: a distribution per sample, from the history of the run. Pure.

Log lengths, in four layers:

    run       all response lengths: a hazard table in log tokens that forgets old steps. For prompts never seen
    prompt    its level, from its own earlier visits (`history`)
    siblings  samples of the same prompt in this step, finished or still running, move the level (`levels`)
    sample    its own tokens so far: its rest has the distribution beyond them (`hazard`)

A forecast is level + scale x shape. The shape is learned as well: the shape of all lengths while little is known about
a prompt, and later the shape of the errors of forecasts of known prompts. A response cut off at max_tokens counts as
"at least" everywhere. Within a step only prompts' own samples are evidence; the run's tables learn when the step has
ended, because the samples that finish first are the short ones.

Deterministic: the same events give the same forecasts, so a resumed run replays its trace (`replay.predictor_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths import kernel
from rlhfless.scaling.lengths.forecast import QUANTILE_LEVELS, Forecast
from rlhfless.scaling.lengths.hazard import HazardTable
from rlhfless.scaling.lengths.history import STEPS_KEPT, History
from rlhfless.scaling.lengths.levels import Levels, update, without_each
from rlhfless.scaling.lengths.samples import Array, BoolArray, Samples
from rlhfless.scaling.lengths.step import OpenStep

LONGEST_TOKENS = 2**22
"""End of the run's table: longer than any known context."""

# Before the first step: a quarter of max_tokens, give or take a factor of e, believed like four samples.
_FIRST_GUESS = 0.25
_FIRST_SD = 1.0
_FIRST_COUNT = 4.0

# The shape of errors begins as a normal one, believed like 64 samples.
_SHAPE_COUNT = 64.0

# A prompt is known once its level's variance is below this share of that between prompts.
_KNOWN = 0.5

_HAZARD_AT_LEVELS = -np.log1p(-QUANTILE_LEVELS)


class LengthPredictor:
    """Events in, forecasts out. Several steps may be open at once; each is known by its number."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the longest response that the engine draws."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; a response has at least 1 token")
        self._max_tokens = max_tokens
        self._run = HazardTable(
            np.linspace(0.0, np.log(LONGEST_TOKENS), 762),  # cells of 2 %
            float(np.log(max(max_tokens * _FIRST_GUESS, 1.0))),
            _FIRST_SD,
            _FIRST_COUNT,
        )
        self._errors = HazardTable(np.linspace(-8.0, 8.0, 321), 0.0, 1.0, _SHAPE_COUNT)
        self._history = History()
        self._mean, self._sd = self._run.moments()
        self._open: dict[int, OpenStep] = {}

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def step_began(self, step: int, prompt_ids: Sequence[str], samples: int | npt.NDArray[np.int64]) -> None:
        """A step begins with this number of samples per prompt, or [prompts]. Raises ValueError if it has begun
        already."""
        if step in self._open:
            raise ValueError(f"step {step} has begun already; end it before it begins again")
        between = self._history.between_variance(self._sd**2)
        prior, spread, seen = self._history.recall(tuple(prompt_ids), self._mean, between)
        self._open[step] = OpenStep(tuple(prompt_ids), samples, prior, spread, seen, between)

    def seen(self, step: int) -> BoolArray:
        """[prompts]: whether a prompt of an open step was in an earlier step."""
        return self._open[step].seen

    def drop(self, step: int) -> None:
        """Abandon an open step, which may begin again: nothing is learned from it. Does nothing for other steps."""
        self._open.pop(step, None)

    def progress(self, step: int, prompt_id: str, sample: int, tokens: int) -> None:
        """A sample has drawn this many tokens and is still running. Raises KeyError for a sample that is not in the
        step."""
        self._open[step].progress(prompt_id, sample, tokens)

    def finished(self, step: int, prompt_id: str, sample: int, tokens: int, *, truncated: bool) -> None:
        """A sample has ended after this many tokens, by itself or because it was `truncated`. Raises KeyError."""
        self._open[step].finish(prompt_id, sample, tokens, truncated)

    def look(self, step: int, tokens: npt.ArrayLike, ended: npt.ArrayLike, truncated: npt.ArrayLike) -> None:
        """The current state of all samples of the step: each [samples], by prompt and then by sample index."""
        self._open[step].look(tokens, ended, truncated)

    def step_ended(self, step: int) -> None:
        """Learn from the step. A sample that never finished counts as at least as long as it was seen."""
        ended = self._open.pop(step)
        samples = ended.samples()
        after = update(ended.prior, ended.spread, samples)
        self._learn_errors(ended, samples)
        known, cut_off = samples.finished, (samples.number > 0) & ~samples.finished
        self._run.add(samples.log_tokens[known], samples.log_tokens[cut_off], STEPS_KEPT)
        self._mean, self._sd = self._run.moments()
        before, spread = ended.prior, ended.spread
        self._history.learn(ended.prompt_ids, self._mean, before, after, spread, ended.seen, samples)

    def forecast(self, step: int) -> Forecast:
        """The remaining lengths of the step's unfinished samples. Raises KeyError for a step that is not open."""
        now = self._open[step]
        running = now.running()
        which = running.prompt
        others = without_each(update(now.prior, now.spread, running.evidence), now.spread, running.evidence)
        levels = Levels(others.mean[: which.size], others.variance[: which.size])
        table = self._left_tokens(levels, now.spread[which], now.between, running.tokens)
        return Forecast(now.prompt_ids, running.sample, running.kind, which, running.tokens, table)

    def _left_tokens(self, levels: Levels, spread: Array, between: float, tokens: Array) -> Array:
        """Quantiles [kinds, Q] of the remaining tokens after `tokens`."""
        known, scale = levels.variance < _KNOWN * between, np.sqrt(levels.variance + spread**2)
        table = np.empty((tokens.size, QUANTILE_LEVELS.size))
        # The run's table stands in log tokens: its own mean and sd make a shape of it.
        run, errors = self._run.shape(self._mean, self._sd), self._errors.shape(0.0, 1.0)
        kernel.left_tokens(
            levels.mean, scale, known, tokens, run, errors, _HAZARD_AT_LEVELS, float(self._max_tokens), table
        )
        return table

    def _learn_errors(self, ended: OpenStep, samples: Samples) -> None:
        scale = np.sqrt(ended.prior.variance + ended.spread**2)
        errors = (samples.log_tokens - ended.prior.mean[samples.prompt]) / scale[samples.prompt]
        of_known = (samples.number > 0) & (ended.prior.variance < _KNOWN * ended.between)[samples.prompt]
        known = of_known & samples.finished
        self._errors.add(errors[known], errors[of_known & ~known], STEPS_KEPT)
