"""The words of a report for contracts, fleets and parts of a run."""

from __future__ import annotations

from rlhfless.sim.experiment.compare import PolicyComparison
from rlhfless.sim.experiment.rows import Part
from rlhfless.sim.scenarios.scenario import (
    BEST_STATIC,
    CheapestContract,
    FastestContract,
    MultipleOf,
    ScenarioContract,
)

PARTS: dict[Part, str] = {"all": "all steps", "first": "first epoch", "later": "later epochs"}


def contract_text(contract: ScenarioContract) -> str:
    """Such as `as cheap as can be, in at most 1.5 x the time of static_colocated over the run`."""
    if isinstance(contract, CheapestContract):
        limit = f"{contract.deadline_s:g} s" if contract.deadline is None else _multiple(contract.deadline, "time")
        return f"as cheap as can be, in at most {limit} {_per(contract.per)}"
    if isinstance(contract, FastestContract):
        limit = f"${contract.budget_usd:g}" if contract.budget is None else _multiple(contract.budget, "cost")
        return f"as fast as can be, for at most {limit} {_per(contract.per)}"
    return f"time weighs {contract.time_weight:g}, cost {1 - contract.time_weight:g}"


def best_fleets(comparison: PolicyComparison) -> str:
    """The best static fleets by seed; empty if the scenario has no such policy."""
    labels = [entry.shown for entry in comparison.scenario.policies if entry.name == BEST_STATIC]
    lines = [f"{label}: {run.fleet}" for label in labels for run in comparison.results.get(label, ())]
    return "; ".join(dict.fromkeys(lines))


def infeasible(comparison: PolicyComparison) -> list[str]:
    """By policy, the number of steps in which no plan could keep its contract, and the reason in the first."""
    lines = []
    for label, runs in comparison.results.items():
        reasons = [reason for run in runs for reason in run.infeasible]
        if reasons:
            steps = sum(len(run.steps) for run in runs)
            lines.append(
                f"{label}: the contract could not be kept by any plan in {len(reasons)} of {steps} steps, and the "
                f"nearest one was kept; of generation in the first of them: {reasons[0]}"
            )
    return lines


def _multiple(measure: MultipleOf, of: str) -> str:
    return f"{measure.times:g} x the {of} of {measure.policy}"


def _per(per: str) -> str:
    return {"run": "over the run", "epoch": "over each epoch", "step": "in each step"}[per]
