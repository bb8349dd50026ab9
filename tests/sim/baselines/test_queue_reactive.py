"""The rules of Ray Serve, Knative and KEDA with their defaults, worked by hand; and the fleet that follows them."""

from __future__ import annotations

import pytest

from fakes.views import ABSENT, UP, fleet_of, learner, replica_slot, view_of
from rlhfless.scaling.policy import (
    Assign,
    Generated,
    Heartbeat,
    Move,
    Release,
    Serving,
    SlotView,
    Start,
    StepBegan,
    StepEnded,
)
from rlhfless.sim.baselines.queue_reactive import (
    Autoscaler,
    Keda,
    KedaSpec,
    Knative,
    KnativeSpec,
    MetricWindow,
    RayServe,
    RayServeSpec,
)
from rlhfless.sim.policies import make_policy


def test_window_averages_over_time() -> None:
    window = MetricWindow(10.0)
    window.record(0.0, 4.0)
    assert window.mean(0.0, 10.0) == 4.0
    window.record(6.0, 1.0)
    assert window.mean(8.0, 4.0) == pytest.approx((2 * 4 + 2 * 1) / 4)
    assert window.mean(8.0, 10.0) == pytest.approx((6 * 4 + 2 * 1) / 8)
    window.record(30.0, 0.0)
    assert window.mean(30.0, 10.0) == pytest.approx(1.0)


def run(autoscaler: Autoscaler, ongoing: dict[float, int], until_s: float, every_s: float) -> dict[float, int]:
    """Replicas over time, where they change; `ongoing` from each time on."""
    replicas, changes = 1, {}
    for tick in range(int(until_s / every_s) + 1):
        at_s = tick * every_s
        now = ongoing[max(since_s for since_s in ongoing if since_s <= at_s)]
        wanted = autoscaler.wanted(at_s, now, replicas)
        if wanted != replicas:
            replicas = changes[at_s] = wanted
    return changes


def test_ray_serve_waits_30_s_up_and_600_s_down() -> None:
    """100 requests want 50 replicas. Without traffic from 40 s on, the mean over 30 s is 96.7 at 41 s and wants 49."""
    changes = run(RayServe(RayServeSpec()), {0: 100}, 40, 0.5)
    assert changes == {30.0: 50}
    changes = run(RayServe(RayServeSpec()), {0: 100, 40: 0}, 700, 0.5)
    assert list(changes) == [30.0, 641.0]
    assert changes[641.0] == 1


def test_knative_panics_at_once_and_goes_to_zero_late() -> None:
    """1,000 requests at 70 a replica want 15, twice the one there is. No more traffic from 30 s on: the panic ends
    60 s after it was called for last, and the mean over 60 s is 0 at 90 s. The last one stays for 30 s."""
    changes = run(Knative(KnativeSpec()), {0: 1000, 30: 0}, 140, 2.0)
    assert changes[0.0] == 15
    assert min(at_s for at_s in changes if at_s > 0) >= 60.0
    assert [changes[at_s] for at_s in sorted(changes)[-3:]] == [2, 1, 0]
    assert max(changes) == 120.0


def test_keda_doubles_each_15_s_and_looks_back_300_s() -> None:
    changes = run(Keda(KedaSpec()), {0: 100, 60: 0}, 800, 15.0)
    assert changes == {0.0: 5, 15.0: 10, 30.0: 20, 345.0: 0}
    from_zero = Keda(KedaSpec())
    assert from_zero.wanted(0.0, 0, 0) == 0
    assert from_zero.wanted(15.0, 3, 0) == 0  # it polls each 30 s
    assert from_zero.wanted(30.0, 3, 0) == 1


FLEET = fleet_of(replica_slot(0), replica_slot(1), replica_slot(2), learner(9))


def test_new_replicas_take_what_waits_and_old_ones_finish_first() -> None:
    policy = make_policy("queue_reactive_keda", KedaSpec(target_value=8.0))
    actions = policy.decide(0.0, StepBegan(), view_of(FLEET, [ABSENT] * 3 + [UP], prompts=24, siblings=1))
    # 24 requests want 3 replicas; one was there.
    assert [a for a in actions if isinstance(a, Start)] == [Start(0), Start(1), Start(2)]
    assert sum(a.samples.size for a in actions if isinstance(a, Assign)) == 24
    # All are at slot 0, which runs 8 of them; slot 1 takes its third.
    tokens = [7] * 8 + [0] * 16
    busy = SlotView(UP.state, running=8, waiting=16)
    home = [0] * 24
    view = view_of(FLEET, [busy, UP, UP, UP], prompts=24, siblings=1, tokens=tokens, home=home)
    (move,) = policy.decide(5.0, Serving(1), view)
    assert isinstance(move, Move)
    assert (move.source, move.target, move.samples.tolist()) == (0, 1, list(range(16, 24)))


def test_one_too_many_goes_when_it_is_empty() -> None:
    policy = make_policy("queue_reactive_keda", KedaSpec(target_value=1.0, downscale_window_s=0.0))
    view = view_of(FLEET, [UP] * 4, prompts=3, siblings=1)
    policy.decide(0.0, StepBegan(), view)
    one_left = {"tokens": [5, 5, 5], "finished": [True, True, False]}
    still = view_of(FLEET, [UP] * 4, prompts=3, siblings=1, home=[-1, -1, 2], **one_left)  # type: ignore[arg-type]
    actions = policy.decide(20.0, Heartbeat(), still)
    assert [a for a in actions if isinstance(a, Release)] == [Release(1)]
    moved = view_of(FLEET, [UP, ABSENT, UP, UP], prompts=3, siblings=1, home=[-1, -1, 0], **one_left)  # type: ignore[arg-type]
    assert policy.decide(21.0, Heartbeat(), moved) == [Release(2)]


def test_requests_count_until_they_end_whenever_the_autoscaler_decides() -> None:
    """140 requests want two replicas. They end after 3 s, between two decisions; after another minute none is wanted,
    and the number is halved. If they counted until the next decision, the mean would still want two."""
    policy = make_policy("queue_reactive_knative", KnativeSpec())
    prompts = 140
    view = view_of(FLEET, [UP] * 4, prompts=prompts, siblings=1)
    policy.decide(0.0, StepBegan(), view)
    policy.decide(2.0, Heartbeat(), view)
    done = view_of(FLEET, [UP] * 4, prompts=prompts, siblings=1, finished=[True] * prompts)
    policy.decide(3.0, Generated(), done)
    actions = policy.decide(70.0, StepEnded(0.0, 70.0), done)
    assert [a for a in actions if isinstance(a, Release)] == [Release(1), Release(2)]


def test_a_replica_that_is_one_too_many_takes_no_share() -> None:
    policy = make_policy("queue_reactive_keda", KedaSpec(target_value=12.0))
    policy.decide(0.0, StepBegan(), view_of(FLEET, [UP] * 4, prompts=24, siblings=1))  # two replicas
    view = view_of(FLEET, [UP] * 4, prompts=24, siblings=1, tokens=[7] * 8 + [0] * 16, home=[0] * 24)
    assert policy.decide(5.0, Serving(2), view) == []
    assert [type(action) for action in policy.decide(5.0, Serving(1), view)] == [Move]
