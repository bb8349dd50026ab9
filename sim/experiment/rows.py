"""The time and cost of a policy over part of a run, as means over the seeds with confidence intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rlhfless.sim.experiment.figures import StepFigures
from rlhfless.sim.statistics import (
    Interval,
    mean_interval,
    positive_interval,
    quantile,
    ratio,
    ratio_interval,
    share_interval,
)
from rlhfless.spec import CheapestSpec, ContractSpec, FastestSpec

Part = Literal["all", "first", "later"]
"""All steps, the steps of the first epoch, or the steps after it: only then has a policy seen the prompts before."""

MILLION = 1e6

E = TypeVar("E")


def steps_of(steps: Sequence[E], part: Part, epoch_steps: int) -> Sequence[E]:
    """The values of a part of a run, of a list with one value per step."""
    if part == "all":
        return steps
    return steps[:epoch_steps] if part == "first" else steps[epoch_steps:]


@dataclass(frozen=True, slots=True)
class Totals:
    """Some steps of one run together."""

    time_s: float
    usd: float
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    response_tokens: float
    steps: int
    p50_s: float
    p99_s: float
    kept: float | None
    """Share of the steps that kept their limit; None without one."""

    @classmethod
    def of(cls, steps: Sequence[StepFigures]) -> Totals:
        """Raises ValueError for no steps."""
        walls = [step.step_s for step in steps]
        judged = [step.kept for step in steps if step.kept is not None]
        return cls(
            time_s=math.fsum(step.time_s for step in steps),
            usd=math.fsum(step.usd for step in steps),
            busy_device_s=math.fsum(step.busy_device_s for step in steps),
            idle_device_s=math.fsum(step.idle_device_s for step in steps),
            cold_device_s=math.fsum(step.cold_device_s for step in steps),
            response_tokens=math.fsum(step.response_tokens for step in steps),
            steps=len(steps),
            p50_s=quantile(walls, 0.5),
            p99_s=quantile(walls, 0.99),
            kept=sum(judged) / len(judged) if judged else None,
        )

    @property
    def held_device_s(self) -> float:
        return self.busy_device_s + self.idle_device_s + self.cold_device_s


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One policy over all seeds."""

    label: str
    step_s: Interval
    """Wall time per step, the waits between steps included."""
    step_usd: Interval
    usd_per_million_tokens: Interval
    """Per million response tokens."""
    busy_device_s: Interval
    """Per step, as the next two."""
    idle_device_s: Interval
    cold_device_s: Interval
    utilisation: Interval
    """Busy device-seconds divided by held device-seconds."""
    p50_s: Interval
    """The median of a step's own wall time."""
    p99_s: Interval
    kept: Interval | None
    """Share of the steps that kept their limit."""
    speed_up: Interval
    """Time of the first policy divided by the time of this one, in pairs of equal seeds."""
    cost_ratio: Interval
    """Cost of this policy divided by the cost of the first one, in pairs of equal seeds."""
    regret: Interval | None
    """Share by which the contract's objective is above the clairvoyant's; None without one."""


def row_of(label: str, runs: Sequence[Totals], first: Sequence[Totals], regrets: Sequence[float] | None) -> ResultRow:
    """`runs` and `first` are by seed, in the same order."""

    def mean(figure: Callable[[Totals], float]) -> Interval:
        return positive_interval([figure(run) for run in runs])

    kept = [run.kept for run in runs if run.kept is not None]
    return ResultRow(
        label=label,
        step_s=mean(lambda run: run.time_s / run.steps),
        step_usd=mean(lambda run: run.usd / run.steps),
        usd_per_million_tokens=mean(lambda run: run.usd / run.response_tokens * MILLION),
        busy_device_s=mean(lambda run: run.busy_device_s / run.steps),
        idle_device_s=mean(lambda run: run.idle_device_s / run.steps),
        cold_device_s=mean(lambda run: run.cold_device_s / run.steps),
        utilisation=share_interval(
            [run.busy_device_s / run.held_device_s if run.held_device_s else 0.0 for run in runs]
        ),
        p50_s=mean(lambda run: run.p50_s),
        p99_s=mean(lambda run: run.p99_s),
        kept=share_interval(kept) if kept else None,
        speed_up=ratio_interval([run.time_s for run in first], [run.time_s for run in runs]),
        cost_ratio=ratio_interval([run.usd for run in runs], [run.usd for run in first]),
        regret=None if regrets is None else mean_interval(regrets),
    )


def objective(contract: ContractSpec, run: Totals, best: Totals) -> float:
    """The objective of the contract, relative to `best`: cost under a deadline, time under a budget, or the weighted
    mean of both. 1 is as good as `best`."""
    time, cost = ratio(run.time_s, best.time_s), ratio(run.usd, best.usd)
    if isinstance(contract, CheapestSpec):
        return cost
    if isinstance(contract, FastestSpec):
        return time
    return contract.time_weight * time + (1 - contract.time_weight) * cost
