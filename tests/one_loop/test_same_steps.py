"""The live loop in virtual time takes as long for each step, and costs as much, as the simulator's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import summarise
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.experiment.run import fleet_of, kind_of, layout_of, settings_of
from rlhfless.sim.run import simulate
from rlhfless.sim.scenarios import Scenario, load_scenario
from rlhfless.sim.scenarios.build import price_book, setup
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.scenarios.scenario import PolicyEntry
from rlhfless.sim.simulation import Simulation
from rlhfless.spec import WeightedSpec

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
ONE_NODE, SPOT = "gsm8k-7b-a100", "reasoning-7b-h100-spot"
POLICIES = ("static_colocated", "cost_aware")
EXACT, NEAR = 0.003, 0.02
"""Of a whole run; and of each step, or of a run on several nodes, which pull weights in another order. A policy plans
with the loads that it has measured; the simulator's loop shows it those of the setup."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [ONE_NODE, SPOT])
def test_each_step_takes_the_same_time_in_both_loops(name: str, policy: str) -> None:
    prices, old, new = both(name, policy)
    assert steps_s(new) == pytest.approx(steps_s(old), rel=NEAR)
    assert sum(steps_s(new)) == pytest.approx(sum(steps_s(old)), rel=EXACT)
    assert usd(new, prices) == pytest.approx(usd(old, prices), rel=EXACT)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [path.stem for path in sorted(SCENARIOS.glob("*.yaml"))])
def test_each_run_takes_the_same_time_in_both_loops(name: str, policy: str) -> None:
    prices, old, new = both(name, policy)
    print(f"{name}, {policy}: {sum(steps_s(new)) / sum(steps_s(old)):.4f}, {usd(new, prices) / usd(old, prices):.4f}")
    assert sum(steps_s(new)) == pytest.approx(sum(steps_s(old)), rel=0.6 * NEAR)
    assert usd(new, prices) == pytest.approx(usd(old, prices), rel=0.6 * NEAR)


def both(name: str, policy: str) -> tuple[PriceBook, Trace, Trace]:
    """Run a policy through a scenario; return its prices, and the traces of the simulator's loop and the live loop."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    entry = PolicyEntry(name=policy)
    kind, prices, drawn = kind_of(scenario, entry), price_book(scenario), batches(scenario, 0)
    parts = setup(scenario, layout_of(scenario, fleet_of(scenario, entry)), 0, reserved=kind.reserved)
    simulation = Simulation(parts, made(scenario, entry), prices)
    for batch in drawn:
        simulation.step(batch)
    return prices, simulation.close(), simulate(parts, made(scenario, entry), prices, drawn)


def made(scenario: Scenario, entry: PolicyEntry) -> Policy:
    """Create a policy that is as fast as it can be."""
    terms = RunContract(WeightedSpec(time_weight=1.0), scenario.steps, span=scenario.steps)
    return kind_of(scenario, entry).make(settings_of(scenario, entry), terms)


def steps_s(trace: Trace) -> list[float]:
    """Return the seconds from the end of each step to that of the next."""
    ends_s: Any = np.diff([step.end_s for step in trace.steps], prepend=0.0)
    return [float(each) for each in ends_s]


def usd(trace: Trace, prices: PriceBook) -> float:
    return summarise(trace, prices).cost_usd
