"""Allocations: which replica sits where, and that no device is sold twice."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName
from rlhfless.scaling.placement import Device, Placement, PlacementError, helpers, place
from rlhfless.spec import PlacementSpec, RunSpec

HELPERS = [FunctionName.SCORING, FunctionName.REFERENCE]


def devices(count: int, kind: str = "cpu-core") -> list[Device]:
    return [Device(f"s-{i}", kind, i) for i in range(count)]


def placed(spec: PlacementSpec, count: int, *, actors: int = 1, per_actor: int = 1, ranks: int = 1) -> Placement:
    return place(
        spec,
        devices(count, "h100"),
        generation_actors=actors,
        devices_per_actor=per_actor,
        learner_ranks=ranks,
        functions=HELPERS,
    )


def names(placement: Placement, function: FunctionName) -> list[list[str]]:
    return [[device.name for device in allocation.devices] for allocation in placement.allocations[function]]


def test_colocated_functions_share_the_devices() -> None:
    placement = placed(PlacementSpec(), 2, actors=2)
    assert names(placement, FunctionName.GENERATION) == [["s-0"], ["s-1"]]
    assert names(placement, FunctionName.LEARNER) == [["s-0", "s-1"]]
    assert names(placement, FunctionName.SCORING) == [["s-1"]]
    assert names(placement, FunctionName.REFERENCE) == [["s-0"]]
    # s-0: an actor, the learner, the reference; s-1: an actor, the learner, scoring.
    assert placement.allocation(FunctionName.GENERATION, 1).shares == pytest.approx((1 / 3,))
    assert placement.allocation(FunctionName.LEARNER, 0).shares == pytest.approx((1 / 3, 1 / 3))


def test_disaggregated_sides_share_nothing() -> None:
    placement = placed(PlacementSpec(mode="disaggregated", learner_devices=2), 5, actors=3, ranks=2)
    assert names(placement, FunctionName.GENERATION) == [["s-0"], ["s-1"], ["s-2"]]
    assert names(placement, FunctionName.LEARNER) == [["s-3", "s-4"]]
    assert placement.allocation(FunctionName.GENERATION, 0).shares == (1,)
    # s-3: the learner and the reference; s-4: the learner and scoring.
    assert placement.allocation(FunctionName.LEARNER, 0).shares == pytest.approx((1 / 2, 1 / 2))


def test_tensor_parallel_actors_take_neighbours() -> None:
    placement = placed(PlacementSpec(), 4, actors=2, per_actor=2)
    assert names(placement, FunctionName.GENERATION) == [["s-0", "s-1"], ["s-2", "s-3"]]


def test_more_actors_than_devices_take_turns() -> None:
    assert names(placed(PlacementSpec(), 2, actors=3), FunctionName.GENERATION) == [["s-0"], ["s-1"], ["s-0"]]


@pytest.mark.parametrize(
    ("spec", "count", "options", "message"),
    [
        (PlacementSpec(devices=4), 2, {}, r"placement.devices asks for 4 device\(s\), but 2 are there"),
        (PlacementSpec(mode="disaggregated"), 1, {}, "leaves none for generation"),
        (PlacementSpec(), 2, {"per_actor": 4}, "tensor_parallel_size is 4, but generation has 2"),
        (PlacementSpec(), 2, {"ranks": 3}, r"learner.ranks is 3, but the learner has 2 device\(s\)"),
    ],
)
def test_too_few_devices_are_refused_by_name(
    spec: PlacementSpec, count: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        placed(spec, count, **options)


@given(
    count=st.integers(1, 9),
    actors=st.integers(1, 12),
    per_actor=st.integers(1, 3),
    disaggregated=st.booleans(),
)
def test_no_device_is_sold_twice(count: int, actors: int, per_actor: int, disaggregated: bool) -> None:
    spec = PlacementSpec(mode="disaggregated" if disaggregated else "colocated")
    try:
        placement = placed(spec, count, actors=actors, per_actor=per_actor)
    except PlacementError:
        assert per_actor > count - disaggregated or (disaggregated and count == 1)
        return
    sold: dict[str, float] = defaultdict(float)
    for allocations in placement.allocations.values():
        for allocation in allocations:
            for device, share in allocation.shared:
                sold[device.name] += share
    assert max(sold.values()) <= 1 + 1e-9


def test_helpers_are_those_that_the_spec_needs() -> None:
    needed = {"model": {"path": "m"}, "prompts": {"path": "p"}}
    judge = {"type": "reward_model", "path": "judge"}
    plain = RunSpec.model_validate({**needed, "rewards": [{"type": "exact_match"}]})
    assert helpers(plain) == [FunctionName.SCORING]
    full = RunSpec.model_validate({**needed, "rewards": [judge], "algorithm": {"kl": {"coefficient": 0.1}}})
    assert helpers(full) == [FunctionName.SCORING, FunctionName.REWARD_MODEL, FunctionName.REFERENCE]


def test_a_replica_is_billed_for_each_device_by_those_who_share_it() -> None:
    placement = place(
        PlacementSpec(),
        devices(2),
        generation_actors=1,
        devices_per_actor=1,
        learner_ranks=1,
        functions=[FunctionName.SCORING],
    )
    # s-0: the actor and the learner; s-1: the learner and scoring.
    assert placement.allocation(FunctionName.LEARNER, 0).shares == (1 / 2, 1 / 2)
    three = placed(PlacementSpec(), 2, actors=3)
    # s-0 has two actors, the learner and the reference; s-1 an actor, the learner and scoring.
    assert three.allocation(FunctionName.LEARNER, 0).shares == (1 / 4, 1 / 3)
