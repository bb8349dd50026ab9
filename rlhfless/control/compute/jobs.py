"""The jobs, by name. Each takes and returns what JSON can hold; imports are made in the job that needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def plan(question: Json) -> Json:
    """Memory, time and cost of a run, on the devices that are there and on others. See objects.PlanObject."""
    from rlhfless.control.compute.planning import planned

    return planned(question)


def static(question: Json) -> Json:
    """The best static fleet for a run's trace. See objects.StaticFleet."""
    from rlhfless.control.compute.static_fleet import best_static
    from rlhfless.records.traces import read_trace
    from rlhfless.sim.workloads.runtime import read_runtime

    folder = question["trace"]
    return best_static(read_trace(folder, tokens=False), read_runtime(folder))


def rewards(question: Json) -> Json:
    """Scores of given samples, by part."""
    from rlhfless.control.compute.reward_scores import scored

    return scored(question)


def check_simulation(question: Json) -> Json:
    """Nothing, if the simulation can begin."""
    from rlhfless.control.compute.simulating import check

    check(question)
    return {}


def simulation(question: Json) -> Json:
    """Policies on a scenario."""
    from rlhfless.control.compute.simulating import simulated

    return simulated(question)


def timeline(question: Json) -> Json:
    """What each device did in the last steps. See objects.TimelineObject."""
    from rlhfless.control.compute.bars import timeline_of

    return timeline_of(question["trace"], question["steps"])


JOBS: dict[str, Callable[[Json], Json]] = {
    "plan": plan,
    "static": static,
    "rewards": rewards,
    "check_simulation": check_simulation,
    "simulation": simulation,
    "timeline": timeline,
}
