"""The same scenario under several ways to pay for its devices: for `benchmarks/policies.py`.

per second   rented to the second, and there again at once: the best case
per minute   rented in whole minutes, and there again 30 s after they were given back
owned        paid for, used or not; a released device is of no use to others
"""

from __future__ import annotations

from dataclasses import dataclass

from against_bound import RunBounds
from goals import OURS, STATIC

from rlhfless.sim.experiment.compare import PolicyComparison, compare
from rlhfless.sim.experiment.statistics import Interval
from rlhfless.sim.scenarios.cluster import BillingTermsSpec, ClusterSpec
from rlhfless.sim.scenarios.scenario import CheapestContract, FastestContract, MultipleOf, PolicyEntry, Scenario

FASTEST = "ours, fastest"
MINUTE_S, BACK_S = 60.0, 30.0
NAMES = ("per second", "per minute", "owned")
WORSE = 1.005
"""Ours counts as worse than static above this ratio of time or of cost."""


@dataclass(frozen=True, slots=True)
class Paid:
    """One scenario under one way to pay, over whole runs."""

    saving_ratio: Interval
    """Cost of the cheapest run that is no slower, by static's."""
    saving_speed_up: Interval
    fastest: Interval
    """How much faster the fastest run for static's cost is."""
    fastest_ratio: Interval
    """Its cost by static's."""
    beaten: tuple[str, ...]
    """Runs that are below their lower bound."""

    @property
    def worse(self) -> bool:
        """Whether static is better under either contract."""
        times = self.saving_speed_up.mean, self.fastest.mean
        return max(self.saving_ratio.mean, self.fastest_ratio.mean) > WORSE or min(times) < 1 / WORSE


def paid(scenario: Scenario) -> dict[str, Paid]:
    """By the names of `NAMES`."""
    return {name: _paid(_with(scenario, name)) for name in NAMES}


def _with(scenario: Scenario, name: str) -> Scenario:
    cluster = scenario.cluster
    tenure = {"tenure": "rented", "released_value": None}
    rented = tuple(
        each.model_copy(update=tenure) if each.tenure == "owned" else each for each in scenario.cluster.machines
    )
    changes: dict[str, object] = {"machines": rented, "billing": BillingTermsSpec(), "reacquire_s": 0.0}
    if name == "per minute":
        changes |= {"billing": BillingTermsSpec(granularity_s=MINUTE_S), "reacquire_s": BACK_S}
    if name == "owned":
        owned = {"tenure": "owned", "released_value": 0.0}
        changes["machines"] = tuple(each.model_copy(update=owned) for each in cluster.machines)
    changed: ClusterSpec = cluster.model_copy(update=changes)
    return scenario.model_copy(update={"cluster": changed})


def _paid(scenario: Scenario) -> Paid:
    static = MultipleOf(times=1.0, policy=STATIC)
    entries = (
        PolicyEntry(name=STATIC),
        PolicyEntry(name=OURS),
        PolicyEntry(name=OURS, label=FASTEST, contract=FastestContract(budget=static, per="run")),
    )
    no_slower = CheapestContract(deadline=static, per="run")
    found: PolicyComparison = compare(scenario.model_copy(update={"policies": entries, "contract": no_slower}))
    rows = {row.label: row for row in found.rows("all")}
    bounds = RunBounds(found.scenario)
    return Paid(
        rows[OURS].cost_ratio,
        rows[OURS].speed_up,
        rows[FASTEST].speed_up,
        rows[FASTEST].cost_ratio,
        tuple(text for runs in found.results.values() for text in bounds.beaten(runs)),
    )
