"""The devices of a learner that has lost ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName
from rlhfless.scaling.learner_ranks import allocations_with, most_ranks
from rlhfless.scaling.placement import Allocation, Device, Node, ReplicaRequest, place
from rlhfless.scaling.placement import Site as At
from rlhfless.spec import PlacementSpec


def devices(*indices: int) -> Allocation:
    return Allocation.of([Device(f"gpu-{i}", "h100", i) for i in indices])


def test_the_most_ranks_whose_devices_are_there() -> None:
    candidates = {2: [devices(0, 1)], 1: [devices(0), devices(1)]}
    assert most_ranks(candidates, lambda each: all(device.index for device in each.devices)) is candidates[1][1]
    assert most_ranks(candidates, lambda _: True) is candidates[2][0]
    assert most_ranks(candidates, lambda _: True, below=2) is candidates[1][0]
    assert most_ranks(candidates, lambda _: True, below=1) is candidates[1][0], "there must be one"
    assert most_ranks(candidates, lambda _: False) is None


def placed(ranks: int, mode: str, gpus: int) -> tuple[list[list[int]], list[int]]:
    """The devices of each allocation of one rank less, and the sizes of the learner's groups."""
    wanted = [
        ReplicaRequest(FunctionName.GENERATION, At.PER_REPLICA),
        ReplicaRequest(FunctionName.LEARNER, At.LEARNER, ranks=ranks, ranks_key="learner.ranks", fewest_ranks=1),
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
