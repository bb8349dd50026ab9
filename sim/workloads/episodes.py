"""Turn drawn numbers of turns into episodes: tokens of each turn, answers of the environment, and waits for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rlhfless.sim.samples import EpisodeTurns, RolloutBatch

SPREAD = 0.5
"""Standard deviation of the logs of turn lengths, answer lengths and waits: two thirds of them are between 0.6 and 1.6
times the median. An assumption."""


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Turns of episodes."""

    turn_tokens: float
    """Median tokens of a turn."""
    answer_tokens: float
    """Median tokens that the environment writes after it."""
    wait_s: float
    """Mean seconds until it has."""
    fewest_turns: int = 1

    def with_turns(self, counted: RolloutBatch, max_tokens: int, seed: int) -> RolloutBatch:
        """Return the episodes of a step, whose `response_tokens` are their numbers of turns.

        An episode ends with the last turn that fits into `max_tokens`; its first turn is cut to them. The tokens do
        not depend on the waits.
        """
        random = np.random.default_rng((seed, counted.step))
        count = np.maximum(counted.response_tokens, self.fewest_turns)
        turns = int(count.sum())
        own, given = (
            np.ceil(median * np.exp(SPREAD * random.standard_normal(turns))).astype(np.int64)
            for median in (self.turn_tokens, self.answer_tokens)
        )
        waits_s = self.wait_s * np.exp(SPREAD * random.standard_normal(turns) - SPREAD**2 / 2)
        first = np.cumsum(count) - count
        own[first] = np.minimum(own[first], max_tokens)
        before = np.cumsum(own + given) - own - given  # tokens of all turns before, of earlier samples too
        end = before - np.repeat(before[first], count) + own
        fits = end <= max_tokens
        sample = np.repeat(np.arange(counted.samples), count)
        kept = np.bincount(sample[fits], minlength=counted.samples)
        last = np.cumsum(kept) - 1
        given = given[fits]
        given[last] = 0
        nothing = np.zeros(counted.samples, np.int64)
        return dataclasses.replace(
            counted,
            response_tokens=end[fits][last],
            truncated=kept < count,
            turns=EpisodeTurns(kept, nothing, end[fits], given, waits_s[fits], nothing.astype(np.float64)),
        )
