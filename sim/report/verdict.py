"""The verdict of a comparison: the policy to take, its savings, and the changes that would alter the choice."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.figures import Part, ResultRow
from rlhfless.sim.experiment.shared import Arrangement
from rlhfless.sim.scenarios.scenario import (
    BEST_STATIC,
    CLAIRVOYANT,
    CheapestContract,
    FastestContract,
    MultipleOf,
    ScenarioContract,
)
from rlhfless.sim.statistics import LEAST_VALUES, Interval

EQUAL = 0.01
"""Figures that differ by less than this share count as equal, and so do those whose interval contains 1."""


def verdict(comparison: PolicyComparison) -> str:
    """Return the policy to take under the scenario's contract; empty with fewer than two to choose from."""
    scenario = comparison.scenario
    names = {entry.shown: entry.name for entry in scenario.policies}
    rows = [row for row in comparison.rows(quoted_part(scenario)) if names[row.label] != CLAIRVOYANT]
    if len(rows) < 2:
        return ""
    contract, first = scenario.contract, rows[0]
    least = min(_objective(row, rows, contract) for row in rows)
    best = next(row for row in rows if _objective(row, rows, contract) <= least * (1 + EQUAL))
    if best is first:
        text = f"Take {first.label}: no other policy is better by {EQUAL:.0%}."
    else:
        text = f"Take {best.label}: {_beside(best, first.label)}."
    seeds = f"{scenario.seeds} seed{'s' * (scenario.seeds != 1)}"
    few = f" Of {seeds}, differences of a few per cent may be chance." if scenario.seeds < LEAST_VALUES else ""
    return f"{text} {_flip(best, rows, contract)}{few}"


def arrangements_verdict(runs: int, found: Sequence[Arrangement]) -> str:
    """Return the arrangement of several runs to take; empty if only one fits."""
    if len(found) < 2:
        return ""
    first, best = found[0], min(found, key=lambda each: each.makespan_s)
    sooner = first.makespan_s / best.makespan_s
    if best is first or sooner < 1 + EQUAL:
        return f"Take {first.name}: no other arrangement ends all {runs} runs sooner by {EQUAL:.0%}."
    text = f"Take {best.name}: all {runs} runs end {sooner:.2f} times as soon as {first.name}, on the same devices."
    mean = min(found, key=lambda each: each.mean_end_s)
    if mean.mean_end_s < best.mean_end_s * (1 - EQUAL):
        text += f" If the mean end counts, take {mean.name}."
    return text


def _figures(row: ResultRow) -> tuple[float, float]:
    """Return time and cost, relative to the first policy."""
    return 1 / row.speed_up.mean, row.cost_ratio.mean


def _objective(row: ResultRow, rows: Sequence[ResultRow], contract: ScenarioContract) -> float:
    """Return the value that the contract minimises, plus a penalty for keeping it less often than another policy."""
    time, cost = _figures(row)
    least_time, least_cost = (min(one) or 1.0 for one in zip(*map(_figures, rows), strict=True))
    time, cost = time / least_time, cost / least_cost
    if not isinstance(contract, CheapestContract | FastestContract):
        return contract.time_weight * time + (1 - contract.time_weight) * cost
    missed = max(_kept(each) for each in rows) - _kept(row)
    limited, other = (time, cost) if isinstance(contract, CheapestContract) else (cost, time)
    return other if missed < EQUAL else 1e3 * (1 + missed) * limited


def _kept(row: ResultRow) -> float:
    return 1.0 if row.kept is None else row.kept.mean


def _beside(row: ResultRow, other: str) -> str:
    time, cost = _figures(row)
    speed = "" if _equal(time, row.speed_up) else f"{_share(time)} {'faster' if time < 1 else 'slower'}"
    price = "" if _equal(cost, row.cost_ratio) else f"{_share(cost)} {'cheaper' if cost < 1 else 'dearer'}"
    if not (speed or price):
        return f"as fast and as cheap as {other}"
    if not speed:
        return f"as fast as {other}, and {price}"
    if not price:
        return f"{speed} than {other}, at the same cost"
    return f"{speed} {'and' if (time < 1) == (cost < 1) else 'but'} {price} than {other}"


def _share(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%}"


def _equal(ratio: float, interval: Interval) -> bool:
    return abs(1 - ratio) < EQUAL or (interval.low < interval.high and interval.low <= 1 <= interval.high)


def _flip(best: ResultRow, rows: Sequence[ResultRow], contract: ScenarioContract) -> str:
    """Return the change of the contract that would change the choice."""
    time, cost = _figures(best)
    faster = [row for row in rows if _figures(row)[0] < time * (1 - EQUAL)]
    cheaper = [row for row in rows if _figures(row)[1] < cost * (1 - EQUAL)]
    if not faster and not cheaper:
        return "No other is faster or cheaper, so no contract changes that."
    if isinstance(contract, CheapestContract):
        if not faster:
            return "No other is faster, so a shorter deadline does not change that."
        row = min(faster, key=lambda each: _figures(each)[0])
        return f"Below a deadline of {best.p99_s.mean:.3g} s a step, its 99th percentile, take {row.label}."
    if isinstance(contract, FastestContract):
        if not cheaper:
            return "No other is cheaper, so a smaller budget does not change that."
        row = min(cheaper, key=lambda each: _figures(each)[1])
        return f"Below a budget of ${best.step_usd.mean:.3g} a step, take {row.label}."
    flips = [(weight, row) for row in (*faster, *cheaper) if (weight := _even_weight(best, row, rows)) is not None]
    if not flips:
        return "No weight of time and cost changes that."
    weight, row = min(flips, key=lambda flip: abs(flip[0] - contract.time_weight))
    side = "more" if _figures(row)[0] < time else "less"
    return f"Where time weighs {side} than {weight:.2f} (here {contract.time_weight:g}), take {row.label}."


def _even_weight(best: ResultRow, other: ResultRow, rows: Sequence[ResultRow]) -> float | None:
    """Return the weight of time at which both are equally good; None if there is none."""
    least_time, least_cost = (min(one) or 1.0 for one in zip(*map(_figures, rows), strict=True))
    saved_time = (_figures(best)[0] - _figures(other)[0]) / least_time
    more_cost = (_figures(other)[1] - _figures(best)[1]) / least_cost
    total = saved_time + more_cost
    return more_cost / total if saved_time * more_cost > 0 else None


PARTS: dict[Part, str] = {"all": "all steps", "first": "first epoch", "later": "later epochs"}


def contract_text(contract: ScenarioContract) -> str:
    """Return a contract in words: `as cheap as can be, in at most 1.5 x the time of static_colocated over the run`."""
    if isinstance(contract, CheapestContract):
        limit = f"{contract.deadline_s:g} s" if contract.deadline is None else _multiple(contract.deadline, "time")
        return f"as cheap as can be, in at most {limit} {_per(contract.per)}"
    if isinstance(contract, FastestContract):
        limit = f"${contract.budget_usd:g}" if contract.budget is None else _multiple(contract.budget, "cost")
        return f"as fast as can be, for at most {limit} {_per(contract.per)}"
    return f"time weighs {contract.time_weight:g}, cost {1 - contract.time_weight:g}"


def best_fleets(comparison: PolicyComparison) -> str:
    """Return the best static fleets by seed; empty if the scenario has no such policy."""
    labels = [entry.shown for entry in comparison.scenario.policies if entry.name == BEST_STATIC]
    lines = [f"{label}: {run.fleet}" for label in labels for run in comparison.results.get(label, ())]
    return "; ".join(dict.fromkeys(lines))


def missed(comparison: PolicyComparison) -> list[str]:
    """Return a line per policy with the number of steps that did not keep the contract, as in the column `kept`.

    The line also has the number of these steps that no plan could keep by its forecast, and the reason of the last of
    them: the first ones have cold starts.
    """
    lines = []
    for label, runs in comparison.results.items():
        late = [(run, each.step) for run in runs for each in run.steps if each.kept is False]
        if not late:
            continue
        lines.append(f"{label}: {len(late)} of {sum(len(run.steps) for run in runs)} steps did not keep the contract")
        if foreseen := [run.infeasible[step] for run, step in late if step in run.infeasible]:
            lines[-1] += f"; for {len(foreseen)} of them no plan could by its forecast, the last one: {foreseen[-1]}"
    return lines


def unused(comparison: PolicyComparison) -> list[str]:
    """Return a line per policy that pays for devices which it uses in no step of any seed."""
    lines = []
    for label, runs in comparison.results.items():
        kinds = set.intersection(*(set(run.unused) for run in runs)) if runs else set()
        fewest = [f"{min(run.unused[kind] for run in runs)} x {kind}" for kind in sorted(kinds)]
        if fewest:
            lines.append(f"{label} never uses {' and '.join(fewest)}: do not rent them")
    return lines


def _multiple(measure: MultipleOf, of: str) -> str:
    return f"{measure.times:g} x the {of} of {measure.policy}"


def _per(per: str) -> str:
    return {"run": "over the run", "epoch": "over each epoch", "step": "in each step"}[per]
