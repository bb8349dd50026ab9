"""Synthetic batches whose lengths behave as in RLHF.

Every prompt has a difficulty of its own, constant over all epochs, so that a policy gains by remembering lengths.
The log of a response's length is

    median of the shape + drift x (step - 1) + spread x (persistence x difficulty + sqrt(1 - persistence^2) x noise)

cut off at `max_tokens`, as an engine does. `BimodalLengths` adds a second, longer kind of answer: a prompt's
difficulty decides how often it is reasoned about at length.

Each prompt and each step has a generator of its own, spawned from the seed: the lengths of step 7 do not depend on
how many steps were drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.sim.samples import RolloutBatch

Floats = npt.NDArray[np.float64]

NORMAL = NormalDist()

PROMPT = "prompt-"
"""The name of a prompt is this and its number."""

GRID = 0.005
"""Step of the grid of log lengths on which the distribution of a mixture is computed."""


class LengthShape(Protocol):
    """The distribution of response lengths, given the difficulty of the prompt."""

    def draw(self, difficulty: Floats, drift: float, random: np.random.Generator) -> Floats:
        """`[samples]` lengths for standard normal `difficulty` [samples]; `drift` is added to their logs."""
        ...

    def quantiles(self, difficulty: Floats, drift: float, levels: Floats) -> Floats:
        """`[prompts, Q]`: quantiles at `levels` [Q] of the lengths that prompts of this difficulty [prompts] draw."""
        ...


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """One kind of answer."""

    median_tokens: float
    spread: float
    """Standard deviation of the log."""
    persistence: float
    """Correlation of a sample's log length with its prompt's difficulty, 0 to 1."""

    def draw(self, difficulty: Floats, drift: float, random: np.random.Generator) -> Floats:
        noise = random.standard_normal(len(difficulty))
        mixed = self.persistence * difficulty + math.sqrt(1 - self.persistence**2) * noise
        lengths: Floats = np.exp(math.log(self.median_tokens) + drift + self.spread * mixed)
        return lengths

    def quantiles(self, difficulty: Floats, drift: float, levels: Floats) -> Floats:
        noise = np.array([NORMAL.inv_cdf(level) for level in levels.tolist()])
        logs = self._log_median(difficulty, drift)[:, None] + self._own_spread * noise
        return np.asarray(np.exp(logs))

    def share_below(self, log_tokens: Floats, difficulty: Floats, drift: float) -> Floats:
        """`[prompts, points]`: share of a prompt's lengths whose log is at most `log_tokens` [points]."""
        scale = max(self._own_spread, 1e-9)
        return _normal_cdf((log_tokens - self._log_median(difficulty, drift)[:, None]) / scale)

    def _log_median(self, difficulty: Floats, drift: float) -> Floats:
        """`[prompts]`."""
        return math.log(self.median_tokens) + drift + self.spread * self.persistence * difficulty

    @property
    def _own_spread(self) -> float:
        """The spread of a prompt's own lengths."""
        return self.spread * math.sqrt(1 - self.persistence**2)


@dataclass(frozen=True, slots=True)
class BimodalLengths:
    """Short answers and long reasoning. `long_share` of all samples are long; harder prompts have more of them."""

    short: LognormalLengths
    long: LognormalLengths
    long_share: float

    def draw(self, difficulty: Floats, drift: float, random: np.random.Generator) -> Floats:
        short = self.short.draw(difficulty, drift, random)
        long = self.long.draw(difficulty, drift, random)
        kept = self.long.persistence
        urge = kept * difficulty + math.sqrt(1 - kept**2) * random.standard_normal(len(difficulty))
        return np.where(urge > NORMAL.inv_cdf(1 - self.long_share), long, short)

    def quantiles(self, difficulty: Floats, drift: float, levels: Floats) -> Floats:
        """The quantiles of the mixture, read off its distribution on a grid of lengths 0.5 % apart."""
        widest = 6 * max(self.short.spread, self.long.spread)
        ends = math.log(self.short.median_tokens) - widest, math.log(self.long.median_tokens) + widest
        grid: Floats = np.arange(min(ends), max(ends), GRID, dtype=np.float64) + drift
        kept = self.long.persistence
        threshold = NORMAL.inv_cdf(1 - self.long_share)
        own = max(math.sqrt(1 - kept**2), 1e-9)
        is_long: Floats = 1 - _normal_cdf((threshold - kept * difficulty) / own)[:, None]
        long, short = (shape.share_below(grid, difficulty, drift) for shape in (self.long, self.short))
        rows = [np.interp(levels, row, grid) for row in is_long * long + (1 - is_long) * short]
        return np.asarray(np.exp(rows))


def _normal_cdf(value: Floats) -> Floats:
    """The standard normal distribution function, by a straight line between points 0.002 apart: off by 1e-7 at most."""
    points, levels = _normal_table()
    return np.asarray(np.interp(value, points, levels))


@cache
def _normal_table() -> tuple[Floats, Floats]:
    points = np.linspace(-8, 8, 8001)
    return points, np.array([NORMAL.cdf(point) for point in points.tolist()])


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """A data set of prompts, visited in a new order each epoch. Raises ValueError if it is smaller than a step."""

    shape: LengthShape
    prompts: int
    prompts_per_step: int
    samples_per_prompt: int
    median_prompt_tokens: float
    max_tokens: int
    drift_per_step: float
    """Added to the log of the length at each step: 0.01 is one per cent longer per step."""
    seed: int

    def __post_init__(self) -> None:
        if self.prompts < self.prompts_per_step:
            raise ValueError(f"prompts ({self.prompts}) is below prompts_per_step ({self.prompts_per_step})")

    def batches(self, steps: int) -> Iterator[RolloutBatch]:
        """The batches of steps 1 .. `steps`."""
        _, of_epochs, of_steps = np.random.SeedSequence(self.seed).spawn(3)
        difficulty, prompt_tokens = self._data()
        per_epoch = self.prompts // self.prompts_per_step
        epochs = of_epochs.spawn(-(-steps // per_epoch))
        for number, seed in enumerate(of_steps.spawn(steps)):
            epoch, turn = divmod(number, per_epoch)
            order = np.random.default_rng(epochs[epoch]).permutation(self.prompts)
            chosen = np.sort(order[turn * self.prompts_per_step :][: self.prompts_per_step])
            group = np.repeat(np.arange(len(chosen)), self.samples_per_prompt)
            random = np.random.default_rng(seed)
            lengths = self.shape.draw(difficulty[chosen][group], self.drift_per_step * number, random)
            yield RolloutBatch(
                step=number + 1,
                prompt_ids=tuple(f"{PROMPT}{prompt}" for prompt in chosen),
                prompt_tokens=prompt_tokens[chosen],
                group=group,
                response_tokens=np.clip(np.rint(lengths), 1, self.max_tokens).astype(np.int64),
                truncated=np.rint(lengths) > self.max_tokens,
            )

    def quantiles(self, batch: RolloutBatch, count: int) -> Floats:
        """`[groups, count]`: of each prompt of a batch, `count` lengths, ascending, that are equally likely: the
        quantiles at the levels (k + 1/2) / count."""
        difficulty, _ = self._data()
        chosen = np.array([int(name.removeprefix(PROMPT)) for name in batch.prompt_ids])
        levels = (np.arange(count) + 0.5) / count
        lengths = self.shape.quantiles(difficulty[chosen], self.drift_per_step * (batch.step - 1), levels)
        return np.clip(np.rint(lengths), 1, self.max_tokens)

    def _data(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        """`[prompts]`: difficulty, and prompt tokens."""
        data = np.random.default_rng(np.random.SeedSequence(self.seed).spawn(3)[0])
        difficulty = data.standard_normal(self.prompts)
        sizes = np.exp(math.log(self.median_prompt_tokens) + 0.5 * data.standard_normal(self.prompts))
        return difficulty, np.maximum(sizes, 1).astype(np.int64)
