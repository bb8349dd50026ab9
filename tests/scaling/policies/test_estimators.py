"""A run's own times, by hand: how much longer the rest of steps takes, and how long starts take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.policies.cost_aware.estimators import COLD, STARTING, RestTimes, StartTimes
from rlhfless.scaling.policy import ReplicaSlot, Start


def seen(*ratios: float) -> RestTimes:
    times = RestTimes(scatter=0.08, weight=2)
    for step, ratio in enumerate(ratios):
        times.begin()
        times.look(at_s=100.0 * step, rest_s=20.0)
        times.end(at_s=100.0 * step + 20.0 * ratio)
    return times


def test_the_median_is_asked_for_where_no_confidence_is() -> None:
    assert seen(1.3, 1.1, 1.2).factor(None) == pytest.approx(1.2)


def test_steps_that_end_early_allow_nothing_more() -> None:
    assert seen(0.8, 0.9).factor(None) == 1.0


def test_before_the_first_step_the_prior_scatter_counts() -> None:
    # z of 0.99 is 2.326; with one degree of freedom t = z (1 + (z^2 + 1) / 4) = 6.056, times a scatter of 0.08.
    assert seen().factor(0.99) == pytest.approx(1 + 6.056 * 0.08, abs=1e-3)
    assert seen().factor(None) == 1.0


def test_more_confidence_asks_for_more_time() -> None:
    times = seen(1.0, 1.1, 1.2)
    assert times.factor(None) < times.factor(0.9) < times.factor(0.99)


def test_a_step_that_was_never_looked_at_teaches_nothing() -> None:
    times = seen(1.2)
    times.begin()
    times.end(at_s=1e6)
    assert times.wanted
    assert times.factor(None) == pytest.approx(1.2)


# -- starts: the wait for devices is apart from what a replica itself takes


LOAD_S = 3.0


def now(at_s: float, reacquire_s: float, state: ReplicaState | None = None) -> Any:
    """One slot, whose replica takes 40 s to start by the fleet's figure."""
    who = FunctionName.GENERATION, FunctionRole.SAMPLES, "h100", ("h100-0",), "n"
    slot = ReplicaSlot(*who, 1.0, 40.0, {}, {}, reacquire_s=reacquire_s)
    fleet = SimpleNamespace(load_s=LOAD_S)
    view = SimpleNamespace(fleet=fleet, slots=[SimpleNamespace(tier=None, state=state)])
    return SimpleNamespace(
        at_s=at_s, view=view, layout=SimpleNamespace(replica_slots=[slot]), awake=lambda _: state is not None
    )


def test_the_wait_for_devices_is_added_and_not_learned() -> None:
    starts = StartTimes()
    assert starts.standby(now(0.0, 240.0), 0) == (COLD, 280.0)
    assert starts.standby(now(0.0, 0.0), 0) == (COLD, 40.0), "a node that is there"
    starts.see(now(100.0, 240.0), [Start(0, None)])
    assert starts.standby(now(150.0, 240.0, ReplicaState.STARTING), 0) == (STARTING, 230.0)
    starts.up(now(100.0 + 240.0 + 50.0 + LOAD_S, 240.0), 0)  # the replica itself took 50 s
    assert starts.standby(now(400.0, 0.0), 0) == (COLD, 50.0)
    assert starts.standby(now(400.0, 180.0), 0) == (COLD, 230.0)
