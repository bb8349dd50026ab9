"""How long starts take, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.policies.cost_aware.estimates import COLD, STARTING, StartTimes
from rlhfless.scaling.policy import ReplicaSlot, Start

# -- starts: the wait for devices is apart from what a replica itself takes


def now(at_s: float, reacquire_s: float, state: ReplicaState | None = None) -> Any:
    """One slot, whose replica takes 40 s to start by the fleet's figure."""
    who = FunctionName.GENERATION, FunctionRole.SAMPLES, "h100", ("h100-0",), "n"
    slot = ReplicaSlot(*who, 1.0, 40.0, reacquire_s=reacquire_s)
    fleet = SimpleNamespace(load_s=3.0)
    view = SimpleNamespace(fleet=fleet, slots=[SimpleNamespace(tier=None, state=state)])
    return SimpleNamespace(
        at_s=at_s, view=view, layout=SimpleNamespace(replica_slots=[slot]), awake=lambda _: state is not None
    )


def test_the_wait_for_devices_is_added_to_the_start() -> None:
    starts = StartTimes()
    assert starts.standby(now(0.0, 240.0), 0) == (COLD, 280.0)
    assert starts.standby(now(0.0, 0.0), 0) == (COLD, 40.0), "a node that is there"
    starts.note_actions(now(100.0, 240.0), [Start(0, None)])
    assert starts.standby(now(150.0, 240.0, ReplicaState.STARTING), 0) == (STARTING, 230.0)
    starts.forget(0)  # it serves, after the step's weights have come: their wait is no part of the start
    assert starts.standby(now(900.0, 0.0), 0) == (COLD, 40.0)
    assert starts.standby(now(900.0, 180.0), 0) == (COLD, 220.0)


def test_devices_that_were_given_back_are_waited_for_and_not_paid_for() -> None:
    starts = StartTimes(lambda *_: 30.0)
    assert starts.standby(now(0.0, 0.0), 0) == (COLD, 70.0)
    starts.note_actions(now(100.0, 0.0), [Start(0, None)])
    assert starts.paid_s(now(120.0, 0.0, ReplicaState.STARTING), 0, 20.0) == 0.0
    assert starts.paid_s(now(135.0, 0.0, ReplicaState.STARTING), 0, 15.0) == 5.0
    starts.forget(0)
    assert starts.standby(now(400.0, 0.0), 0) == (COLD, 70.0)
    assert starts.paid_s(now(400.0, 0.0, ReplicaState.SERVING), 0, 9.0) == 9.0
