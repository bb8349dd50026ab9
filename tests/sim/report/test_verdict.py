"""The verdict of a comparison, from rows whose figures are worked by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fakes.tiny_scenario import scenario
from rlhfless.sim.experiment.figures import ResultRow, Totals, row_of
from rlhfless.sim.experiment.shared import Arrangement
from rlhfless.sim.report.verdict import arrangements_verdict, verdict
from rlhfless.sim.scenarios import Scenario

WEIGHTED = {"type": "weighted", "time_weight": 0.5}
DEADLINE = {"type": "cheapest", "deadline_s": 20}
BUDGET = {"type": "fastest", "budget_usd": 9}


def totals(time_s: float, usd: float, kept: float | None) -> Totals:
    return Totals(10 * time_s, 10 * usd, 1.0, 1.0, 1.0, 1.0, 10, time_s, time_s, kept)


@dataclass(frozen=True)
class Compared:
    """As PolicyComparison, of figures (seconds, USD, kept) by policy."""

    scenario: Scenario
    figures: dict[str, tuple[float, float, float | None]]
    results: dict[str, object] = field(default_factory=dict)

    def rows(self, _: str) -> list[ResultRow]:
        runs = {label: [totals(*each)] * self.scenario.seeds for label, each in self.figures.items()}
        first = next(iter(runs.values()))
        return [row_of(label, each, first, None) for label, each in runs.items()]


def said(contract: dict[str, object], seeds: int = 3, **figures: tuple[float, float, float | None]) -> str:
    policies = [{"name": name} for name in figures]
    return verdict(Compared(scenario(policies=policies, contract=contract, seeds=seeds), figures))  # type: ignore[arg-type]


def test_a_policy_that_is_better_in_both_is_taken_under_every_contract() -> None:
    got = said(WEIGHTED, static=(20, 2.0, None), cost_aware=(18, 1.5, None))
    assert got == (
        "Take cost_aware: 10.0% faster and 25.0% cheaper than static. No other is faster or cheaper, so no contract "
        "changes that."
    )


def test_the_weight_at_which_the_choice_changes_is_told() -> None:
    # By the least of each: static 1, 2; cost_aware 1.25, 1. Equal at w where w + 2 (1 - w) = 1.25 w + 1 - w: w = 0.8.
    got = said(WEIGHTED, static=(20, 2.0, None), cost_aware=(25, 1.0, None))
    assert got.startswith("Take cost_aware: 25.0% slower but 50.0% cheaper than static.")
    assert got.endswith("Where time weighs more than 0.80 (here 0.5), take static.")


def test_equal_policies_leave_the_first() -> None:
    got = said(WEIGHTED, seeds=2, static=(20, 2.0, None), cost_aware=(19.9, 2.0, None))
    assert got.startswith("Take static: no other policy is better by 1%. No other is faster or cheaper")
    assert got.endswith("Of 2 seeds, differences of a few per cent may be chance.")


def test_equal_times_are_said_in_words() -> None:
    got = said(WEIGHTED, static=(20, 2.0, None), cost_aware=(20.1, 1.0, None))
    assert got.startswith("Take cost_aware: as fast as static, and 50.0% cheaper.")
    got = said(WEIGHTED, static=(20, 2.0, None), cost_aware=(10, 2.0, None))
    assert got.startswith("Take cost_aware: 50.0% faster than static, at the same cost.")


def test_a_policy_that_misses_the_deadline_is_not_taken_for_its_price() -> None:
    got = said(DEADLINE, static=(20, 2.0, 1.0), lazy=(40, 0.5, 0.2), cost_aware=(19, 1.8, 1.0))
    assert got.startswith("Take cost_aware: 5.0% faster and 10.0% cheaper than static.")
    assert got.endswith("No other is faster, so a shorter deadline does not change that.")
    got = said(DEADLINE, static=(10, 2.0, 1.0), cost_aware=(19, 1.8, 1.0))
    assert got.endswith("Below a deadline of 19 s a step, its 99th percentile, take static.")


def test_a_budget_takes_the_fastest_that_keeps_it() -> None:
    got = said(BUDGET, static=(20, 2.0, 1.0), cost_aware=(15, 3.0, 1.0))
    assert got.startswith("Take cost_aware: 25.0% faster but 50.0% dearer than static.")
    assert got.endswith("Below a budget of $3 a step, take static.")


def test_nobody_can_take_a_policy_that_knows_the_lengths() -> None:
    got = said(WEIGHTED, static=(20, 2.0, None), cost_aware=(20, 2.0, None), clairvoyant=(1, 0.1, None))
    assert got.startswith("Take static")
    assert said(WEIGHTED, static=(20, 2.0, None), clairvoyant=(1, 0.1, None)) == ""


def arranged(name: str, makespan_s: float, mean_end_s: float) -> Arrangement:
    return Arrangement(name, makespan_s, mean_end_s, 0.9)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(100, 75), (50, 50)], "Take two: all 2 runs end 2.00 times as soon as one, on the same devices."),
        ([(100, 75), (90, 85)], "Take two: all 2 runs end 1.11 times as soon as one, on the same devices. If the mean "
         "end counts, take one."),
        ([(100, 75), (100, 90)], "Take one: no other arrangement ends all 2 runs sooner by 1%."),
        ([(100, 75)], ""),
    ],
)  # fmt: skip
def test_the_arrangement_that_ends_first_is_taken(found: list[tuple[float, float]], told: str) -> None:
    named = [arranged(name, *each) for name, each in zip(("one", "two"), found, strict=False)]
    assert arrangements_verdict(2, named) == told
