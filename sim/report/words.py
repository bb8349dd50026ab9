"""The words of a report for contracts, fleets and parts of a run."""

from __future__ import annotations

from rlhfless.records import FunctionName, Work
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
    """By policy, the number of steps whose contract no plan kept by its forecast, how many were missed in the end, and
    the reason of the last such plan: the first ones have cold starts."""
    lines = []
    for label, runs in comparison.results.items():
        reasons = [reason for run in runs for reason in run.infeasible]
        if reasons:
            steps = [step for run in runs for step in run.steps]
            missed = sum(step.kept is False for step in steps)
            lines.append(
                f"{label}: no plan kept the contract by its forecast in {len(reasons)} of {len(steps)} steps, so the "
                f"nearest one was made; {missed} steps missed it. The last of these plans: {reasons[-1]}"
            )
    return lines


def unused(comparison: PolicyComparison) -> list[str]:
    """By policy, the kinds of machines that it pays for and of which it never used a device."""
    lines = []
    for label, (run, *_) in comparison.results.items():
        if run.trace is None:
            continue
        used = {held.device_kind for held in run.trace.holdings}
        machines = [each for each in comparison.scenario.cluster.machines if run.fleet.rents(each.kind)]
        idle = [f"{each.devices} x {each.kind}" for each in machines if each.kind not in used]
        if idle:
            lines.append(f"{label} never uses {' or '.join(idle)}: do not rent them")
    return lines


def _multiple(measure: MultipleOf, of: str) -> str:
    return f"{measure.times:g} x the {of} of {measure.policy}"


def _per(per: str) -> str:
    return {"run": "over the run", "epoch": "over each epoch", "step": "in each step"}[per]


def work_text(function: str, work: Work) -> str:
    """The name of a call's work. A critic's is of the same kinds as that of the reference and the learner."""
    if function == FunctionName.CRITIC and work in _OF_CRITIC:
        return _OF_CRITIC[work]
    return "reference" if work is Work.LOGPROBS else str(work).replace("_", " ")


_OF_CRITIC = {Work.LOGPROBS: "critic values", Work.LEARN: "critic learn"}
