"""The contract of a run: as the scenario gives it, or as a multiple of another policy's time or cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlhfless.scaling.policies.contract import keeps
from rlhfless.sim.experiment.figures import StepFigures
from rlhfless.sim.scenarios.scenario import (
    CheapestContract,
    FastestContract,
    MultipleOf,
    PolicyEntry,
    Scenario,
    ScenarioContract,
    WeightedContract,
)
from rlhfless.spec import CheapestSpec, ContractSpec, FastestSpec, WeightedSpec
from rlhfless.spec.explain import nearest
from rlhfless.spec.fleet import Per
from rlhfless.util.errors import UserError


class ContractError(UserError):
    """A contract that is measured by an unknown policy, or by itself."""


def contract_of(scenario: Scenario, entry: PolicyEntry) -> ScenarioContract:
    """Return the entry's own contract, or the scenario's."""
    return entry.contract if entry.contract is not None else scenario.contract


def measure_of(contract: ScenarioContract) -> MultipleOf | None:
    """Return the measure of a relative contract; None for a contract in numbers."""
    if isinstance(contract, CheapestContract):
        return contract.deadline
    if isinstance(contract, FastestContract):
        return contract.budget
    return None


def measured_by(scenario: Scenario, entry: PolicyEntry) -> str | None:
    """Return the label of the policy whose figures the entry's contract multiplies; None for a contract in numbers."""
    measure = measure_of(contract_of(scenario, entry))
    return None if measure is None else measure.policy


def measures_itself(scenario: Scenario, entry: PolicyEntry) -> bool:
    """Return whether the contract is a multiple of this policy's own figures, so that it runs without a contract."""
    return entry.contract is None and measured_by(scenario, entry) == entry.shown


def in_order(scenario: Scenario, wanted: Sequence[PolicyEntry]) -> list[list[PolicyEntry]]:
    """Return the policies in rounds, adding those that their contracts are measured by, each after its measure.

    Raises ContractError for a missing measure, or a circle of measures.
    """
    entries = {entry.shown: entry for entry in scenario.policies}
    needs: dict[str, str | None] = {}
    pending = list(wanted)
    while pending:
        entry = pending.pop()
        measure = None if measures_itself(scenario, entry) else measured_by(scenario, entry)
        if measure is not None and measure not in entries:
            raise ContractError(
                f"the contract of policy {entry.shown!r} is measured by {measure!r}, which is not among the "
                f"policies; {nearest(measure, entries)}There are {', '.join(entries)}"
            )
        needs[entry.shown] = measure
        if measure is not None and measure not in needs:
            pending.append(entries[measure])
    rounds: list[list[PolicyEntry]] = []
    done: set[str | None] = {None}
    while missing := [label for label in entries if label in needs and label not in done]:
        ready = [label for label in missing if needs[label] in done]
        if not ready:
            raise ContractError(
                f"the contracts of {', '.join(missing)} are measured by each other; give one of them in numbers"
            )
        rounds.append([entries[label] for label in ready])
        done |= set(ready)
    return rounds


def span_of(contract: ScenarioContract, scenario: Scenario) -> int:
    """Return the number of steps that share one limit of the contract."""
    per = "step" if isinstance(contract, WeightedContract) else contract.per
    return {"step": 1, "epoch": scenario.epoch_steps, "run": scenario.steps}[per]


def resolved(contract: ScenarioContract, measured: Sequence[StepFigures] | None, span: int) -> list[ContractSpec]:
    """Return the contract in numbers, for the run or per step.

    There is one per step if it is a multiple of another policy's figures in the same step or epoch. `measured` are the
    steps, with the same seed, of the policy that a relative contract names; `span` is `span_of`.
    """
    measure = measure_of(contract)
    if isinstance(contract, WeightedContract):
        return [WeightedSpec(time_weight=contract.time_weight)]
    per: Per = "step" if contract.per == "step" else "run"
    if isinstance(contract, CheapestContract):
        if measure is None:
            return [CheapestSpec(deadline_s=_given(contract.deadline_s), per=per)]
        times = [figures.step_s if per == "step" else figures.time_s for figures in _measured(measured)]
        limits = [measure.times * limit for limit in _together(times, span)]
        return [CheapestSpec(deadline_s=limit, per=per) for limit in limits]
    if measure is None:
        return [FastestSpec(budget_usd=_given(contract.budget_usd), per=per)]
    costs = _together([figures.usd for figures in _measured(measured)], span)
    if not all(costs):
        raise ContractError(
            f"contract.budget: {measure.times:g} times what {measure.policy} costs is 0 USD: its devices have no "
            "price; give budget_usd, or take a `weighted` or `cheapest` contract"
        )
    return [FastestSpec(budget_usd=measure.times * cost, per=per) for cost in costs]


def _together(values: Sequence[float], span: int) -> list[float]:
    """Return, by step, the sum over the `span` steps that share its limit; one value if all do."""
    sums = [sum(values[first : first + span]) for first in range(0, len(values), span)]
    return sums if len(sums) == 1 else [sums[step // span] for step in range(len(values))]


def judged(figures: Sequence[StepFigures], contracts: Sequence[ContractSpec], span: int) -> list[StepFigures]:
    """Return the figures with each step's even share of its limit, and whether that limit was kept (`keeps`)."""
    judgements: list[StepFigures] = []
    for first in range(0, len(figures), span):
        together = figures[first : first + span]
        contract = contracts[min(first, len(contracts) - 1)]
        if isinstance(contract, WeightedSpec):
            judgements += together
            continue
        limit = contract.deadline_s if isinstance(contract, CheapestSpec) else contract.budget_usd
        seconds = sum(each.step_s if contract.per == "step" else each.time_s for each in together)
        kept = keeps(contract, seconds, sum(each.usd for each in together), limit)
        judgements += [dataclasses.replace(each, limit=limit / len(together), kept=kept) for each in together]
    return judgements


def _given(value: float | None) -> float:
    assert value is not None, "the schema asks for one of the two"
    return value


def _measured(figures: Sequence[StepFigures] | None) -> Sequence[StepFigures]:
    assert figures is not None, "policies are run in rounds, each behind what it is measured by"
    return figures
