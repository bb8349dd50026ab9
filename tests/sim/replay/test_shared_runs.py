"""A run that shared its devices with other runs is replayed alone on them."""

from __future__ import annotations

from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.sim.replay.fleet import Life, _side_by_side


def life(function: str, share: float, *cores: int) -> Life:
    devices = [Device(f"cpu-{core}", CPU_KIND, core) for core in cores]
    return Life(function, f"{function}-0", Allocation.of(devices, share), 0.0, 1.0)


def test_functions_that_had_a_device_whole_in_turn_share_it() -> None:
    lives = [
        life("generation", 1.0, 0),
        life("learner", 1.0, 0, 1),
        life("learner", 1.0, 0, 1),  # after a loss: they were never there together
        life("scoring", 0.0, 1),
    ]
    assert [each.allocation.shares for each in _side_by_side(lives)] == [(0.5,), (0.5, 1.0), (0.5, 1.0), (0.0,)]
