"""What waits for an environment cost, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from fakes.builders import traced
from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.records.traces import Trace, TracedRollout, TraceMeta, TurnSpan
from rlhfless.scaling.episode_waits import EpisodeWaits, episode_waits
from rlhfless.scaling.prices import DevicePrice, PriceBook

PRICES = PriceBook(
    devices=(
        DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=date(2026, 11, 21)),
        DevicePrice(kind="h100", usd_per_hour=3.6, source="test", as_of=date(2026, 11, 21)),
    )
)


def hold(
    function: FunctionName, replica: str, device: str, state: ReplicaState, start_s: float, end_s: float
) -> Holding:
    kind = "cpu-core" if function is FunctionName.ENVIRONMENT else "h100"
    return Holding(function, replica, replica, device, kind, 1.0, state, start_s, end_s)


def episode(actor: str, *turns: tuple[float, float, int, int]) -> TracedRollout:
    """An episode of turns of 10 tokens: (started_s, ended_s, context_tokens, cached_tokens)."""
    spans = tuple(
        TurnSpan(context - 5, context + 5, context, cached, started_s, ended_s, 0.0)
        for started_s, ended_s, context, cached in turns
    )
    return replace(traced(1, actor=actor), turns=len(turns), environment_s=10.0, turn_spans=spans)


def test_waits_of_two_episodes_on_two_devices_by_hand() -> None:
    """One episode waits from 10 to 40, and generates until 50; the other generates from 5 to 20. So the actor waits
    from 20 to 40 on two devices, of which the last 10 s are another incarnation's start."""
    up, starting = ReplicaState.SERVING, ReplicaState.STARTING
    generation, environment = FunctionName.GENERATION, FunctionName.ENVIRONMENT
    holdings = (
        *(hold(generation, "a", device, up, 0, 30) for device in ("gpu-0", "gpu-1")),
        *(hold(generation, "a", device, starting, 30, 40) for device in ("gpu-0", "gpu-1")),
        *(hold(generation, "a", device, up, 40, 50) for device in ("gpu-0", "gpu-1")),
        hold(generation, "b", "gpu-2", up, 0, 50),
        hold(environment, "e", "cpu-0", up, 0, 100),
    )
    rollouts = (
        episode("a", (0, 10, 20, 0), (40, 50, 35, 16)),  # 30 tokens were known, 16 were still cached
        episode("a", (5, 20, 20, 0)),
        traced(1, index=1, actor="b"),
    )
    found = episode_waits(Trace(TraceMeta("demo", 1, {}, {}, {}), holdings, (), rollouts, (), (), ()), PRICES)
    assert found == EpisodeWaits(
        episodes_s=20.0,
        actors_device_s=pytest.approx(20.0),
        actors_usd=pytest.approx(20 * 0.001),
        recomputed_tokens=14,
        environment_s=100.0,
        environment_usd=pytest.approx(100 * 0.00001),
    )


def test_a_run_without_an_environment_has_none() -> None:
    trace = Trace(TraceMeta("demo", 1, {}, {}, {}), (), (), (traced(1),), (), (), ())
    assert episode_waits(trace, PRICES) is None
