"""The two bounds: `cost_aware` with more knowledge of the lengths than any policy can have. Only a simulator has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasters import Clairvoyant, DistributionOracle, Forecaster
from rlhfless.scaling.policy import Ints, Policy
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.draw import synthetic
from rlhfless.sim.scenarios.scenario import CLAIRVOYANT, Scenario
from rlhfless.sim.scenarios.work import BimodalWorkload, LognormalWorkload
from rlhfless.spec import CostAwareSpec
from rlhfless.spec.errors import InputError, Problem

LENGTHS = 256
"""How many equally likely lengths stand for a prompt's distribution: its 99.8 % quantile is the last of them."""


def bound(
    name: str,
    settings: CostAwareSpec,
    run: RunContract,
    scenario: Scenario,
    batches: Sequence[RolloutBatch],
    seed: int,
) -> Policy:
    """The clairvoyant, which knows each length, or the oracle that knows each prompt's distribution.

    Raises InputError if the workload's distributions are not known.
    """
    knows = _clairvoyant(batches) if name == CLAIRVOYANT else _oracle(scenario, batches, seed)
    return CostAware(settings, run, knows)


def _clairvoyant(batches: Sequence[RolloutBatch]) -> Forecaster:
    by_step = {batch.step: batch.response_tokens for batch in batches}

    def lengths(step: int) -> Ints:
        return by_step[step]

    return Clairvoyant(lengths)


def _oracle(scenario: Scenario, batches: Sequence[RolloutBatch], seed: int) -> Forecaster:
    workload = scenario.workload
    if not isinstance(workload, LognormalWorkload | BimodalWorkload):
        what = f"the lengths of a workload of type {workload.type} are known, but not their distributions"
        raise InputError(scenario.name, [Problem("policies", what, "leave `distribution_oracle` out")])
    generator = synthetic(scenario, workload, seed)
    by_step = {batch.step: batch for batch in batches}
    known: dict[int, NDArray[np.float64]] = {}

    def quantiles(step: int) -> NDArray[np.float64]:
        if step not in known:
            known.clear()
            known[step] = generator.quantiles(by_step[step], LENGTHS)
        return known[step]

    return DistributionOracle(quantiles)
