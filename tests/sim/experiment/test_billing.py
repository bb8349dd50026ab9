"""Rounded billing, devices that take time to get back, and owned ones: ours is never worse than static."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fakes.repository import SCENARIOS
from fakes.tiny_scenario import actor, batch_of, play, repeated, scenario, setup_of
from fakes.views import Evenly, Scripted
from rlhfless.scaling.policy import Action, Event, Generated, Release, StepView
from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.devices import SimulatedDevices
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.experiment.figures import unheld_usd
from rlhfless.sim.experiment.run import FleetShape, layout_of, supply_of
from rlhfless.sim.scenarios import Scenario, load_scenario
from rlhfless.sim.scenarios.build import price_book
from rlhfless.sim.scenarios.cluster import BillingTermsSpec
from rlhfless.sim.scenarios.scenario import CheapestContract, MultipleOf, PolicyEntry
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.virtual_loop import run_virtual
from rlhfless.util.clock import unix_s

STATIC, OURS = "static_colocated", "cost_aware"
TERMS: dict[str, dict[str, Any]] = {
    "minutes": {"billing": BillingTermsSpec(granularity_s=60), "reacquire_s": 30.0},
    "ten minutes at least": {"billing": BillingTermsSpec(minimum_s=600), "reacquire_s": 30.0},
    "owned": {"tenure": "owned", "released_value": 0.0},
    "owned, lent to others": {"tenure": "owned", "released_value": 0.5, "reacquire_s": 30.0},
}


def with_terms(one: Scenario, tenure: str | None = None, released_value: float | None = None, **terms: Any) -> Scenario:
    cluster = one.cluster.model_copy(update=terms)
    if tenure is not None:
        owned = {"tenure": tenure, "released_value": released_value}
        machines = tuple(each.model_copy(update=owned) for each in cluster.machines)
        cluster = cluster.model_copy(update={"machines": machines})
    return one.model_copy(update={"cluster": cluster})


PAIRS = [
    *(("gsm8k-3b-h100", terms) for terms in TERMS),
    ("paper-3b-l40s", "minutes"),
    ("paper-3b-l40s", "owned, lent to others"),
    ("reasoning-7b-h100", "ten minutes at least"),
    ("reasoning-7b-h100", "owned"),
]
"""Scenarios of minutes and of hours: each of the terms with two scenarios, of which the first takes least time."""


@pytest.mark.parametrize(("name", "terms"), PAIRS)
def test_ours_is_never_worse_than_static(name: str, terms: str) -> None:
    no_slower = CheapestContract(deadline=MultipleOf(times=1.0, policy=STATIC), per="run")
    entries = (PolicyEntry(name=STATIC), PolicyEntry(name=OURS))
    one = load_scenario(SCENARIOS / f"{name}.yaml")
    one = one.model_copy(update={"policies": entries, "contract": no_slower, "seeds": 1})
    one = with_terms(one, **TERMS[terms])
    found = compare(one)
    static, ours = (found.results[label][0] for label in (STATIC, OURS))
    assert ours.usd <= static.usd * 1.005
    assert ours.time_s <= static.time_s * 1.005


def test_a_device_is_there_again_after_a_while_unless_it_is_still_paid_for() -> None:
    """Leases are paid for in whole minutes. Each row: how long the device is away, and the wait for it."""
    terms = RentalTerms(granularity_s=60.0, reacquire_s=30.0)
    setup = setup_of(actor(0), terms=terms, node_s=0.0)
    allocation = setup.actors[0].slot_setup.allocation

    async def waits_s(devices: SimulatedDevices) -> list[float]:
        waits = []
        for held_s, away_s in ((50.0, 9.0), (41.0, 19.0), (50.0, 13.0), (1.0, 1.0)):
            asked_s = unix_s()
            await devices.acquire(allocation, "actor", lambda _: None)
            waits.append(unix_s() - asked_s)
            await asyncio.sleep(held_s)
            await devices.release("actor")
            await asyncio.sleep(away_s)
        return waits

    async def run() -> list[float]:
        return await waits_s(SimulatedDevices(setup))

    # The lease of 0 s goes on at 59 s and at 119 s. At 182 s it has ended.
    assert run_virtual(run()) == pytest.approx([0.0, 0.0, 0.0, 30.0])


def test_leases_by_hand() -> None:
    minutes = RentalTerms(granularity_s=60.0, minimum_s=90.0, reacquire_s=5.0)
    assert minutes.paid_until_s(10.0, 20.0) == 130.0  # at least 90 s, in whole minutes
    assert minutes.paid_until_s(10.0, 200.0) == 250.0
    assert minutes.another_s(50.0) == 30.0 + 40.0
    assert RentalTerms().free
    assert RentalTerms().paid_until_s(10.0, 20.0) == 20.0


def test_the_wait_for_a_device_delays_a_policy_that_gives_it_back() -> None:
    def gives_back(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(0),) if isinstance(event, Generated) else ()

    ends_s: dict[str, list[float]] = {"keeps": [], "gives back": []}
    for reacquire_s in (0.0, 20.0):
        setup = setup_of(actor(0), terms=RentalTerms(reacquire_s=reacquire_s))
        for name, policy in (("keeps", Evenly()), ("gives back", Scripted(gives_back))):
            trace, _ = play(setup, repeated(batch_of([(5, [20])]), 2), policy)
            ends_s[name].append(trace.steps[-1].end_s)
    assert ends_s["gives back"][1] == pytest.approx(ends_s["gives back"][0] + 20.0)
    assert ends_s["keeps"][1] == ends_s["keeps"][0]


def test_a_reserved_fleet_is_rounded_once() -> None:
    one = scenario(policies=[{"name": STATIC}], seeds=1)
    (plain,) = compare(one).results[STATIC]
    (rounded,) = compare(with_terms(one, billing=BillingTermsSpec(granularity_s=3600))).results[STATIC]
    kind = one.cluster.machines[0]
    price = kind.devices * price_book(one).device(kind.kind).usd_per_hour
    assert rounded.usd - plain.usd == pytest.approx(price * (1 - plain.time_s / 3600), rel=1e-6)


def test_owned_devices_that_a_fleet_leaves_out_are_paid_for() -> None:
    owned = {"kind": "h100", "devices_per_node": 2, "tenure": "owned", "released_value": 0.25}
    one = scenario(cluster={"machines": [owned]}, seeds=1, policies=[{"name": STATIC}])
    prices = price_book(one)
    layout = layout_of(one, FleetShape(ScenarioPlacementSpec(mode="colocated"), 1))
    supply = supply_of(one, layout, reserved=True)
    assert (supply.count, supply.spare) == ({"h100": 1}, {"h100": 1})
    # For an hour: the reserved device in full, the other without the quarter that other users pay.
    kept = prices.device("h100").usd_per_hour * 1.75
    assert unheld_usd([], 3600.0, prices, supply) == pytest.approx(kept)
