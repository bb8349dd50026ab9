"""The best fleet that never changes, for the steps that a run has done: simulated on the run's own trace. Pure.

Each number of actors that the run could have had is simulated, with latencies fitted to the run. The best is the
cheapest that is no slower than the run itself, in the same simulation; if all are slower, the fastest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfless.records.traces import Trace
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies import make_policy
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.measured import WALL
from rlhfless.sim.replay.replay import Replay, replay
from rlhfless.sim.samples import RolloutBatch
from rlhfless.spec import WeightedSpec
from rlhfless.spec.policies import StaticSpec

SLOWER = 1.01
"""A fleet counts as no slower within this factor: the simulation is no better than that."""

MOST_STEPS = 100
"""The newest steps are simulated, at most so many."""


def best_static(trace: Trace, drawn: Sequence[RolloutBatch]) -> dict[str, Any]:
    """`StaticFleet` as JSON. Raises TraceError for a trace without whole steps."""
    batches = drawn[-MOST_STEPS:]
    latency = calibrate([trace])
    own = replay(trace, batches, latency)
    most = (trace.meta.spec.get("scaling") or {}).get("generation", {}).get("max_actors", 1)
    run = RunContract(WeightedSpec(), max(len(trace.steps), 1))
    tried = []
    for actors in range(1, int(most) + 1):
        policy = make_policy("static", StaticSpec(actors=actors), run)
        tried.append((actors, replay(trace, batches, latency, ("static", policy))))
    actors, chosen = _best(own, tried)
    return {
        "actors": actors,
        "cost_usd": chosen.predicted_usd,
        "wall_s": wall_s(chosen),
        "same_cost_usd": own.predicted_usd,
        "steps": len(chosen.steps),
    }


def wall_s(again: Replay) -> float:
    """The wall time of all steps of a replay."""
    return sum(step.predicted_s[WALL] for step in again.steps)


def _best(own: Replay, tried: Sequence[tuple[int, Replay]]) -> tuple[int, Replay]:
    limit_s = SLOWER * wall_s(own)
    in_time = [pair for pair in tried if wall_s(pair[1]) <= limit_s]
    if in_time:
        return min(in_time, key=lambda pair: (pair[1].predicted_usd, pair[0]))
    return min(tried, key=lambda pair: (wall_s(pair[1]), pair[0]))
