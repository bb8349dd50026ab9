"""Runs beside the lower bound of their own fleet: whether one beats it, and the best that a part of a run can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from step_bound import FleetBound, StepBound, TradeOff

from rlhfless.sim.experiment.rows import Part, steps_of
from rlhfless.sim.experiment.run import FleetShape, RunResult, layout_of, supply_of
from rlhfless.sim.scenarios.build import price_book, setup
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.scenarios.scenario import Scenario

ROUNDING = 1e-6
"""A run beats its bound if it is below it by more than this share; sums of thousands of times differ by less."""


class RunBounds:
    """The bounds of a scenario's steps, by fleet and seed; each is computed once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._fleet = lru_cache(maxsize=None)(self._fleet_bound)
        self._steps = lru_cache(maxsize=None)(self._step_bounds)

    def steps(self, fleet: FleetShape, seed: int) -> Sequence[StepBound]:
        """By step, of one run."""
        return self._steps(fleet, seed)

    def trade_off(self, fleet: FleetShape, seed: int, part: Part) -> TradeOff:
        """Of a part of a run."""
        scenario = self._scenario
        return TradeOff.of(steps_of(self.steps(fleet, seed), part, scenario.epoch_steps))

    def beaten(self, runs: Iterable[RunResult]) -> list[str]:
        """What runs are below their bound, in words; empty unless simulator or bound are wrong."""
        return [text for run in runs for text in self._beaten(run)]

    def _beaten(self, run: RunResult) -> list[str]:
        bounds = self.steps(run.fleet, run.seed)
        kept_usd_per_s = bounds[0].fleet.kept_usd_per_s
        time_s = np.array([step.time_s for step in run.steps])
        usd = np.array([step.usd for step in run.steps])
        least_s = np.array([bound.least_s for bound in bounds])
        least_usd = np.array(
            [float(bound.least_usd(np.array([took]))[0]) for bound, took in zip(bounds, time_s, strict=True)]
        )
        least_usd += kept_usd_per_s * time_s
        if self._scenario.steps_ahead:  # a step's work is in the windows of several steps
            time_s, usd = time_s.sum(keepdims=True), usd.sum(keepdims=True)
            least_s, least_usd = least_s.sum(keepdims=True), least_usd.sum(keepdims=True)
        found = []
        for index in np.flatnonzero(time_s < least_s * (1 - ROUNDING)).tolist():
            found.append(f"{run.label}, seed {run.seed}, step {index}: {time_s[index]:.6g} s < {least_s[index]:.6g} s")
        for index in np.flatnonzero((usd < least_usd * (1 - ROUNDING)) & (time_s >= least_s)).tolist():
            found.append(f"{run.label}, seed {run.seed}, step {index}: {usd[index]:.6g} $ < {least_usd[index]:.6g} $")
        return found

    def _fleet_bound(self, fleet: FleetShape, seed: int) -> FleetBound:
        scenario = self._scenario
        layout = layout_of(scenario, fleet)
        supply = supply_of(scenario, layout, reserved=False)
        return FleetBound(setup(scenario, layout, seed), price_book(scenario), supply)

    def _step_bounds(self, fleet: FleetShape, seed: int) -> tuple[StepBound, ...]:
        bound = self._fleet(fleet, 0)
        return tuple(map(bound.of, batches(self._scenario, seed)))
