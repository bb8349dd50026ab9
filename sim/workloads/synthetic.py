"""Generate synthetic batches whose lengths behave as in RLHF.

Every prompt has a difficulty of its own, constant over all epochs, so that a policy gains by remembering lengths. The
log of a response's length is

median of the shape + drift x (step - 1) + spread x (persistence x difficulty + sqrt(1 - persistence^2) x noise)

limited to `max_tokens`, as an engine does. `BimodalLengths` adds a second, longer kind of answer: a prompt's difficulty
decides how often it is reasoned about at length.

Each prompt and each step has a random generator of its own, spawned from the seed: the lengths of step 7 do not depend
on how many steps were generated before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.sim.samples import RolloutBatch

Floats = npt.NDArray[np.float64]

NORMAL = NormalDist()


class LengthShape(Protocol):
    """The distribution of response lengths, given the difficulty of the prompt."""

    def draw(self, difficulty: Floats, drift: float, random: np.random.Generator) -> Floats:
        """Return lengths `[samples]` for standard normal `difficulty` [samples]; `drift` is added to their logs."""
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
        """Yield the batches of steps 1 .. `steps`."""
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
                prompt_ids=tuple(f"prompt-{prompt}" for prompt in chosen),
                prompt_tokens=prompt_tokens[chosen],
                group=group,
                response_tokens=np.clip(np.rint(lengths), 1, self.max_tokens).astype(np.int64),
                truncated=np.rint(lengths) > self.max_tokens,
            )

    def _data(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return difficulty and prompt tokens, each `[prompts]`."""
        data = np.random.default_rng(np.random.SeedSequence(self.seed).spawn(3)[0])
        difficulty = data.standard_normal(self.prompts)
        sizes = np.exp(math.log(self.median_prompt_tokens) + 0.5 * data.standard_normal(self.prompts))
        return difficulty, np.maximum(sizes, 1).astype(np.int64)
