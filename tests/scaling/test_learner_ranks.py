"""How many ranks a learner has: figures worked by hand, and which devices fewer ranks take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName
from rlhfless.scaling.learner_ranks import (
    GroupSize,
    RankSpeeds,
    StepMeasured,
    after_fault,
    allocations_with,
    choose_size,
    rank_rates,
)
from rlhfless.scaling.placement import Allocation, Device, Node, Wanted
from rlhfless.scaling.placement import Site as At
from rlhfless.scaling.placing import place
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget, Weighted
from rlhfless.spec import PlacementSpec

USD = {GroupSize(ranks, "h100"): float(ranks) for ranks in (1, 2, 4)}
"""A US dollar a second for each rank."""


def measured(ranks: int = 2, **changes: float) -> StepMeasured:
    """A step of 10 s, 4 of them for two ranks alone, beside devices for 2 USD/s; a B200 is 2.5 times as fast."""
    speeds = {"h100": 1.0, "b200": 2.5}
    values = {
        "size": GroupSize(ranks, "h100"),
        "speeds": speeds,
        "step_s": 10.0,
        "learn_s": 4.0,
        "alone_s": 4.0,
        "others_usd_per_s": 2.0,
    }
    return StepMeasured(**{"change_s": 0.0, "steps_left": 10, **values, **changes})  # type: ignore[arg-type]


def test_learning_takes_as_long_as_there_are_fewer_ranks() -> None:
    # 1: 6 + 8 s at 3 USD/s; 2: 6 + 4 at 4; 4: 6 + 2 at 6.
    assert [measured().step_with(size, USD) for size in USD] == [(14.0, 42.0), (10.0, 40.0), (8.0, 48.0)]


def test_what_is_hidden_behind_generation_costs_no_time() -> None:
    """Of 4 s of learning 3 are hidden: with four ranks all 2 s are, and with one 5 of 8 s are not."""
    step = measured(alone_s=1.0)
    assert [step.step_with(size, USD)[0] for size in USD] == [9.0 + 5.0, 10.0, 9.0]


def test_a_change_is_paid_by_the_steps_that_are_left() -> None:
    """20 s over 10 steps, in which the larger of the two groups is paid for."""
    assert measured(change_s=20.0).step_with(GroupSize(4, "h100"), USD) == (10.0, 48.0 + 2.0 * 6)
    assert measured(change_s=20.0).step_with(GroupSize(2, "h100"), USD) == (10.0, 40.0)


@pytest.mark.parametrize(
    ("contract", "ranks"),
    [
        (CheapestUnderDeadline(20.0), 2),
        (CheapestUnderDeadline(9.0), 4),
        (CheapestUnderDeadline(5.0), 4),  # none keeps it, and four come nearest
        (FastestUnderBudget(60.0), 4),
        (FastestUnderBudget(45.0), 2),
        (FastestUnderBudget(10.0), 2),
        (Weighted(1.0), 4),
        (Weighted(0.0), 2),
    ],
)
@pytest.mark.parametrize("now", [1, 2, 4])
def test_the_contract_decides_wherever_the_group_is_now(contract: Contract, ranks: int, now: int) -> None:
    step = measured().step_with(GroupSize(now, "h100"), USD)[0]
    choice = choose_size(measured(ranks=now, step_s=step, learn_s=8.0 / now, alone_s=8.0 / now), USD, contract)
    assert choice.size == GroupSize(ranks, "h100")
    assert str(contract) in choice.reason


def test_near_its_end_a_run_keeps_its_learner() -> None:
    assert choose_size(measured(change_s=20.0, steps_left=100), USD, Weighted(1.0)).size.ranks == 4
    assert choose_size(measured(change_s=20.0, steps_left=5), USD, Weighted(1.0)).size.ranks == 2


def test_another_kind_learns_as_much_faster_as_it_is() -> None:
    """Two ranks learn 4 s of 10: one on a B200 takes 3.2 s, at 6 USD/s for all instead of 4."""
    other = GroupSize(1, "b200")
    assert measured().step_with(other, USD | {other: 4.0}) == pytest.approx((9.2, 9.2 * 6))
    near = {GroupSize(2, "h100"): 2.0, other: 4.0}
    assert choose_size(measured(), near, Weighted(1.0)).size == other
    assert choose_size(measured(), near, Weighted(0.0)).size == GroupSize(2, "h100")
    assert choose_size(measured(), near, CheapestUnderDeadline(9.5)).size == other


def test_speeds_are_as_measured_where_both_kinds_were_and_else_by_data_sheets() -> None:
    speeds = RankSpeeds({"h100": 600.0, "b200": 1500.0, "l40s": 150.0})
    assert speeds.relative_to("h100") == {"h100": 1.0, "b200": 2.5, "l40s": 0.25}
    speeds.observe(GroupSize(1, "b200"), 1.0, 1000)
    speeds.observe(GroupSize(2, "h100"), 0.0, 1000)
    assert speeds.relative_to("h100")["b200"] == 2.5, "nothing was learned on h100"
    speeds.observe(GroupSize(2, "h100"), 1.0, 1000)
    assert speeds.relative_to("h100") == {"h100": 1.0, "b200": 2.0, "l40s": 0.25}
    assert speeds.relative_to("b200")["h100"] == 0.5


def test_a_single_kind_needs_no_data_sheet() -> None:
    assert rank_rates({"mine"}) == {"mine": 1.0}
    rates = rank_rates({"h100", "cpu-core"})
    assert rates["h100"] > rates["cpu-core"]


def test_a_size_is_read_back() -> None:
    assert GroupSize.parse(str(GroupSize(8, "h100"))) == GroupSize(8, "h100")
    with pytest.raises(ValueError, match="eight"):
        GroupSize.parse("eight x h100")


def devices(*indices: int, kind: str = "h100") -> Allocation:
    return Allocation.of([Device(f"gpu-{i}", kind, i) for i in indices])


def test_after_a_fault_the_most_ranks_whose_devices_are_there() -> None:
    two, one = GroupSize(2, "h100"), GroupSize(1, "h100")
    candidates = {two: [devices(0, 1)], one: [devices(0), devices(1)]}
    lost_0 = after_fault(candidates, lambda allocation: all(each.index for each in allocation.devices), "h100")
    assert lost_0[0] is candidates[one][1]
    assert after_fault(candidates, lambda _: True, "h100")[0] is candidates[two][0]
    assert after_fault(candidates, lambda _: True, "h100", below=two)[0] is candidates[one][0]
    assert after_fault(candidates, lambda _: True, "h100", below=one)[0] is candidates[one][0], "there must be one"
    allocation, reason = after_fault(candidates, lambda _: False, "h100")
    assert allocation is candidates[two][0]
    assert "waits" in reason


def test_after_a_fault_another_kind_comes_where_none_of_the_own_is_there() -> None:
    own, other = GroupSize(1, "h100"), GroupSize(4, "l40s")
    candidates = {own: [devices(0)], other: [devices(1, 2, 3, 4, kind="l40s")]}
    assert after_fault(candidates, lambda _: True, "h100")[0] is candidates[own][0]
    gone = after_fault(candidates, lambda allocation: allocation.devices[0].kind == "l40s", "h100")
    assert gone == (candidates[other][0], "the most ranks whose devices are there, as no devices of kind h100 are")
    assert after_fault(candidates, lambda _: True, "h100", below=own)[0] is candidates[other][0]


def placed(ranks: int, mode: str, gpus: int) -> tuple[list[list[int]], list[int]]:
    """The devices of each allocation of one rank less, and the sizes of the learner's groups."""
    wanted = [
        Wanted(FunctionName.GENERATION, At.WINDOWS),
        Wanted(FunctionName.LEARNER, At.SIDE, ranks=ranks, ranks_key="learner.ranks", fewest_ranks=1),
    ]
    spec = PlacementSpec.model_validate({"mode": mode, **({"learner_devices": ranks} if mode != "colocated" else {})})
    placement = place(spec, [Node("n", "n", 16, 16, "h100", gpus, gpus)], wanted)
    whole = placement.allocation(FunctionName.LEARNER, 0)
    fewer = allocations_with(placement, whole, ranks, ranks - 1)
    assert all(allocation.ranks == ranks - 1 for allocation in fewer)
    sizes = [len(group.devices) for group in placement.groups if group.name.startswith("learner")]
    return [[device.index for device in allocation.devices] for allocation in fewer], sizes


def test_devices_that_are_apart_are_left_out_one_by_one() -> None:
    assert placed(3, "disaggregated", 4) == ([[1, 2], [2, 3], [1, 3]], [1, 1, 1])


def test_co_located_ranks_keep_all_devices_which_are_held_together() -> None:
    assert placed(3, "colocated", 3) == ([[0, 1, 2]], [3])


@given(st.integers(2, 6), st.data())
def test_whichever_device_is_lost_the_others_go_on(ranks: int, data: st.DataObject) -> None:
    found, _ = placed(ranks, "disaggregated", ranks + 1)
    lost = data.draw(st.integers(1, ranks))
    assert [sorted(each) for each in found if lost not in each] == [[i for i in range(1, ranks + 1) if i != lost]]
