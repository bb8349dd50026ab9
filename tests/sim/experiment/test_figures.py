"""A run in figures, and contracts measured by other policies: worked by hand."""

from __future__ import annotations

from datetime import date

import pytest

from fakes.tiny_scenario import scenario
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, StepRecord, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.policies.contract import RunContract, keeps, order_of
from rlhfless.scaling.prices import Billing, DevicePrice, Owned, PriceBook
from rlhfless.sim.experiment.compare import fleets
from rlhfless.sim.experiment.contracts import ContractError, in_order, judged, resolved, span_of
from rlhfless.sim.experiment.figures import DeviceSupply, StepFigures, Totals, objective, step_figures, steps_of
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.spec import CheapestSpec, FastestSpec, WeightedSpec

TODAY = date(2026, 11, 21)


def book(**h100: object) -> PriceBook:
    return PriceBook(
        devices=(
            DevicePrice(kind="cpu-core", usd_per_hour=0.36, source="test", as_of=TODAY),
            DevicePrice.model_validate(
                {"kind": "h100", "usd_per_hour": 3.6, "source": "test", "as_of": TODAY, "rented_by": "device"} | h100
            ),
        )
    )


def holding(device: str, state: ReplicaState, start_s: float, end_s: float) -> Holding:
    function = FunctionName.SCORING if device.startswith("cpu") else FunctionName.GENERATION
    kind = "cpu-core" if device.startswith("cpu") else "h100"
    return Holding(function, device, f"{device}-life1", device, kind, 1.0, state, start_s, end_s)


def trace() -> Trace:
    """Two steps, 0..10 and 10..16; one device starts, works, and is given back at 14; one core is held throughout."""
    holdings = (
        holding("h100-0", ReplicaState.STARTING, 0.0, 2.0),
        holding("h100-0", ReplicaState.SERVING, 2.0, 14.0),
        holding("cpu-0", ReplicaState.SERVING, 0.0, 16.0),
    )
    actor = (FunctionName.GENERATION, "h100-0", "h100-0-life1", Work.GENERATE)
    calls = (Invocation(*actor, 1, 3.0, 8.0), Invocation(*actor, 2, 9.0, 13.0))
    steps = tuple(
        StepRecord(number, start_s, end_s, {"generation_s": 4.0, "response_tokens": 100.0})
        for number, start_s, end_s in ((1, 0.0, 10.0), (2, 11.0, 16.0))
    )
    return Trace(TraceMeta("test", 1, {}, {}, {}), holdings, calls, steps=steps)


def test_windows_by_hand() -> None:
    first, second = step_figures(trace(), book(), DeviceSupply({"h100": 2}, reserved=False))
    assert (first.time_s, first.step_s) == (10.0, 10.0)
    assert (second.time_s, second.step_s) == (6.0, 5.0)  # one second of waiting before it
    assert (first.cold_device_s, first.busy_device_s, first.idle_device_s) == pytest.approx((2.0, 6.0, 2.0))
    assert (second.cold_device_s, second.busy_device_s, second.idle_device_s) == pytest.approx((0.0, 3.0, 1.0))
    assert first.usd == pytest.approx(10 * 0.001 + 10 * 0.0001)
    assert second.usd == pytest.approx(4 * 0.001 + 6 * 0.0001)


def test_nodes_that_are_rented_whole_are_paid_for_throughout() -> None:
    """Two devices that the policy may hold, and two others on their node, over all of both windows."""
    nodes = book(rented_by="node", billing=Billing(granularity_s=60.0, source="test", as_of=TODAY))
    supply = DeviceSupply({"h100": 2}, reserved=False, spare={"h100": 2})
    first, second = step_figures(trace(), nodes, supply)
    rounded = 4 * (60 - 16) * 0.001 / 2
    assert first.usd == pytest.approx(4 * 10 * 0.001 + 10 * 0.0001 + rounded)
    assert second.usd == pytest.approx(4 * 6 * 0.001 + 6 * 0.0001 + rounded)


def test_reserved_and_owned_devices_are_paid_for_while_no_run_holds_them() -> None:
    _, second = step_figures(trace(), book(), DeviceSupply({"h100": 2}, reserved=True))
    assert second.usd == pytest.approx(2 * 6 * 0.001 + 6 * 0.0001)
    owned = book(owned=Owned(released_value=0.25))
    _, second = step_figures(trace(), owned, DeviceSupply({"h100": 2}, reserved=False))
    # 4 of 12 device-seconds are held; of the other 8 other users pay a quarter.
    assert second.usd == pytest.approx((4 + 8 * 0.75) * 0.001 + 6 * 0.0001)


def test_what_the_seller_rounds_up_is_shared_out() -> None:
    minutes = book(billing=Billing(granularity_s=60.0, source="test", as_of=TODAY))
    steps = step_figures(trace(), minutes, DeviceSupply({"h100": 2}, reserved=False))
    assert sum(step.usd for step in steps) == pytest.approx(60 * 0.001 + 16 * 0.0001)


def steps(*times: float, usd: float = 1.0) -> list[StepFigures]:
    return [StepFigures(i + 1, t, t, t / 2, usd, 1.0, 0.0, 0.0, 10.0) for i, t in enumerate(times)]


def contract(**values: object) -> Scenario:
    return scenario(contract=values)


def test_contracts_in_numbers() -> None:
    measured = steps(10.0, 20.0, usd=2.0)
    per_run = contract(type="cheapest", deadline={"times": 1.5, "policy": "a"}, per="run").contract
    assert resolved(per_run, measured, 2) == [CheapestSpec(deadline_s=45.0, per="run")]
    per_step = contract(type="cheapest", deadline={"times": 1.5, "policy": "a"}).contract
    assert resolved(per_step, measured, 1) == [CheapestSpec(deadline_s=15.0), CheapestSpec(deadline_s=30.0)]
    budget = contract(type="fastest", budget={"times": 0.5, "policy": "a"}, per="run").contract
    assert resolved(budget, measured, 2) == [FastestSpec(budget_usd=2.0, per="run")]
    assert resolved(contract(type="weighted").contract, None, 1) == [WeightedSpec(time_weight=0.5)]


def test_an_epoch_has_a_limit_of_its_own() -> None:
    measured = steps(10.0, 20.0, 30.0, 40.0, 50.0)
    per_epoch = contract(type="cheapest", deadline={"times": 1.0, "policy": "a"}, per="epoch").contract
    limits = resolved(per_epoch, measured, 2)
    assert limits == [CheapestSpec(deadline_s=limit, per="run") for limit in (30.0, 30.0, 70.0, 70.0, 50.0)]
    # The last epoch has one step, which has all of its limit.
    kept = judged(measured, limits, 2)
    assert [step.limit for step in kept] == [15.0, 15.0, 35.0, 35.0, 50.0]
    run = RunContract(limits[0], 5, tuple(limits), span=2)
    assert [run.opens(step) for step in range(5)] == [True, False, True, False, True]
    assert [run.steps_left(step) for step in range(6)] == [2, 1, 2, 1, 1, 1]
    assert span_of(per_epoch, contract(type="weighted")) == contract(type="weighted").epoch_steps


@pytest.mark.parametrize(("limit", "kept"), [(30.0, True), (29.0, False)])
def test_steps_that_share_a_limit_keep_it_together_as_a_plan_does(limit: float, kept: bool) -> None:
    """A run of 10 and 20 s keeps 30 s, in a simulation and in a plan: the second step alone is above its share."""
    spec = CheapestSpec(deadline_s=limit, per="run")
    found = judged(steps(10.0, 20.0), [spec], 2)
    assert [(step.limit, step.kept) for step in found] == [(limit / 2, kept)] * 2
    assert keeps(spec, 30.0, 1.0, limit) is kept
    assert order_of([(30.0, 1.0), (1.0, 2.0)], spec, limit)[0] == (not kept)


def test_steps_with_limits_of_their_own_are_judged_alone() -> None:
    kept = judged(steps(10.0, 20.0), [CheapestSpec(deadline_s=9.0), CheapestSpec(deadline_s=21.0)], 1)
    assert [step.kept for step in kept] == [False, True]
    assert [step.kept for step in judged(steps(1.0), [WeightedSpec()], 1)] == [None]


def test_a_policy_runs_behind_the_one_it_is_measured_by() -> None:
    relative = {"type": "cheapest", "deadline": {"times": 1.0, "policy": "static_colocated"}}
    after = {"type": "fastest", "budget": {"times": 1.0, "policy": "second"}}
    policies = [
        {"name": "static", "label": "third", "contract": after},
        {"name": "static", "label": "second"},
        {"name": "static_colocated"},
    ]
    one = scenario(contract=relative, policies=policies)
    labels = [[entry.shown for entry in entries] for entries in in_order(one, one.policies[:1])]
    assert labels == [["static_colocated"], ["second"], ["third"]]


def test_measures_that_are_missing_or_go_in_circles_are_refused() -> None:
    def policies(**measured_by: str) -> list[dict[str, object]]:
        return [
            {
                "name": "static",
                "label": label,
                "contract": {"type": "cheapest", "deadline": {"times": 1.0, "policy": other}},
            }
            for label, other in measured_by.items()
        ]

    circle = scenario(policies=policies(a="b", b="a"))
    with pytest.raises(ContractError, match="the contracts of a, b are measured by each other"):
        in_order(circle, circle.policies)
    missing = scenario(policies=policies(a="bb", b="a"))
    with pytest.raises(ContractError, match=r"'a' is measured by 'bb', which is not .*did you mean `b`\?"):
        in_order(missing, missing.policies)


def totals(time_s: float, usd: float) -> Totals:
    return Totals.of([StepFigures(1, time_s, time_s, time_s, usd, 1.0, 0.0, 0.0, 10.0)])


def test_objectives_are_by_the_best() -> None:
    assert objective(CheapestSpec(deadline_s=1), totals(9, 3.0), totals(3, 2.0)) == pytest.approx(1.5)
    assert objective(FastestSpec(budget_usd=1), totals(9, 3.0), totals(3, 2.0)) == pytest.approx(3.0)
    assert objective(WeightedSpec(time_weight=0.25), totals(9, 3.0), totals(3, 2.0)) == pytest.approx(1.875)


def test_every_static_fleet_is_tried() -> None:
    one = scenario(cluster={"machines": [{"kind": "l40s", "devices_per_node": 4}]})
    found = [(fleet.placement.mode, fleet.devices, fleet.placement.learner_devices) for fleet in fleets(one)]
    assert [size for mode, size, _ in found if mode == "colocated"] == [1, 2, 3, 4]
    assert [(size, apart) for mode, size, apart in found if mode == "disaggregated"] == [
        *((2, 1), (3, 1), (4, 1)),
        *((3, 2), (4, 2)),
    ]


def test_parts_of_a_run() -> None:
    run = steps(1.0, 2.0, 3.0)
    assert [step.step for step in steps_of(run, "first", 2)] == [1, 2]
    assert [step.step for step in steps_of(run, "later", 2)] == [3]
    assert len(steps_of(run, "all", 2)) == 3
