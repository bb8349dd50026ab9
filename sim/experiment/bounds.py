"""The clairvoyant bound: `cost_aware` with response lengths that only a simulator knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasts import Forecaster, RemainingLengths
from rlhfless.scaling.policy import Ints, Policy, StepView
from rlhfless.sim.samples import RolloutBatch
from rlhfless.spec import CostAwareSpec


class Clairvoyant(Forecaster):
    """Knows each length. `lengths` takes a step's number, and gives the tokens of its samples [samples]."""

    def __init__(self, lengths: Callable[[int], Ints]) -> None:
        self._lengths = lengths

    def look(self, view: StepView) -> RemainingLengths:
        samples = np.flatnonzero(~view.finished)
        left = self._lengths(view.step)[samples] - view.tokens[samples]
        return RemainingLengths(samples, np.array([0.5]), np.arange(samples.size), np.maximum(left, 1.0)[:, None])


def clairvoyant(settings: CostAwareSpec, run: RunContract, batches: Sequence[RolloutBatch]) -> Policy:
    """Create the policy that knows each response's length."""
    lengths = {batch.step: batch.response_tokens for batch in batches}
    return CostAware(settings, run, Clairvoyant(lengths.__getitem__))
