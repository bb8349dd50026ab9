"""The two bounds: `cost_aware` with knowledge of response lengths that only a simulator has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.lengths import QUANTILE_LEVELS
from rlhfless.scaling.lengths.forecast import runs
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasters import Forecaster, RemainingLengths
from rlhfless.scaling.policy import Ints, Policy, StepView
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.draw import synthetic
from rlhfless.sim.scenarios.scenario import CLAIRVOYANT, Scenario
from rlhfless.sim.scenarios.work import BimodalWorkload, LognormalWorkload
from rlhfless.spec import CostAwareSpec
from rlhfless.spec.errors import InputError, Problem

LENGTHS = 256
"""Number of equally likely lengths that stand for a prompt's distribution; the last one is its 99.8 % quantile."""


class Clairvoyant(Forecaster):
    """Knows each length. `lengths` takes a step's number, and gives the tokens of its samples [samples]."""

    def __init__(self, lengths: Callable[[int], Ints]) -> None:
        self._lengths = lengths

    def look(self, view: StepView) -> RemainingLengths:
        samples = np.flatnonzero(~view.finished)
        left = self._lengths(view.step)[samples] - view.tokens[samples]
        return RemainingLengths(samples, np.array([0.5]), np.arange(samples.size), np.maximum(left, 1.0)[:, None])


class DistributionOracle(Forecaster):
    """Knows the distribution of each prompt's lengths, which siblings are drawn from independently.

    `quantiles` takes a step's number, and gives for each prompt K lengths [groups, K], ascending, that are equally
    likely: its quantiles at (k + 0.5) / K.
    """

    def __init__(self, quantiles: Callable[[int], NDArray[np.float64]]) -> None:
        self._quantiles = quantiles

    def look(self, view: StepView) -> RemainingLengths:
        table = self._quantiles(view.step)
        samples = np.flatnonzero(~view.finished)
        kind, first = runs(view.group[samples], view.tokens[samples])
        group, tokens, count = view.group[samples[first]], view.tokens[samples[first]], table.shape[1]
        # Of the K lengths the ones up to the tokens drawn are ruled out; the levels are of the rest.
        flat = table + (np.arange(len(table)) * (table.max() + 1))[:, None]
        out = np.searchsorted(flat.ravel(), tokens + group * (table.max() + 1), side="right") - group * count
        rank = out[:, None] + (count - out)[:, None] * QUANTILE_LEVELS - 0.5
        left = np.clip(np.floor(rank).astype(np.int64), 0, count - 1)
        right = np.minimum(left + 1, count - 1)
        share = np.clip(rank - left, 0.0, 1.0)
        total = table[group[:, None], left] * (1 - share) + table[group[:, None], right] * share
        return RemainingLengths(samples, QUANTILE_LEVELS, kind, np.maximum(total - tokens[:, None], 1.0))


def bound(
    name: str,
    settings: CostAwareSpec,
    run: RunContract,
    scenario: Scenario,
    batches: Sequence[RolloutBatch],
    seed: int,
) -> Policy:
    """The clairvoyant, which knows each length, or the oracle, which knows each prompt's distribution of lengths.

    Raises InputError if the workload's distributions are not known.
    """
    if name == CLAIRVOYANT:
        lengths = {batch.step: batch.response_tokens for batch in batches}
        return CostAware(settings, run, Clairvoyant(lengths.__getitem__))
    workload = scenario.workload
    if not isinstance(workload, LognormalWorkload | BimodalWorkload):
        what = f"the lengths of a workload of type {workload.type} are known, but not their distributions"
        raise InputError(scenario.name, [Problem("policies", what, "leave `distribution_oracle` out")])
    generator = synthetic(scenario, workload, seed)
    by_step = {batch.step: batch for batch in batches}
    # A step's quantiles are asked for at each of its events, and never again after it.
    quantiles = lru_cache(maxsize=1)(lambda step: generator.quantiles(by_step[step], LENGTHS))
    return CostAware(settings, run, DistributionOracle(quantiles))
