"""Measure the seconds of a recorded step by stage, and the load of its machine. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhfless.records import FunctionName, Invocation, StepRecord, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import Phase, clip, cold_starts, length, step_times, union
from rlhfless.scaling.placement import CPU_KIND

STAGES = (
    Phase.GENERATION,
    Phase.SCORING,
    Phase.REFERENCE,
    Phase.TEACHER,
    Phase.CRITIC,
    Phase.COLUMNS,
    Phase.LEARN,
    Phase.SYNC,
)
"""The simulated stages of a step."""

NOT_SIMULATED = frozenset({Work.HELD_OUT, Work.CHECKPOINT, Work.RESTORE})

WALL = "step"


def measured_s(record: StepRecord, trace: Trace) -> dict[str, float]:
    """Return the seconds of a recorded step by stage, without the unsimulated evaluations, checkpoints and faults."""
    times = step_times(record, trace.invocations)
    apart = union(
        (max(call.start_s, record.resumed_s), min(call.end_s, record.end_s))
        for call in trace.invocations
        if call.work in NOT_SIMULATED
    )
    wall_s = times.wall_s - times.recovery_s - length(apart)
    return {**{str(stage): times.phases_s[stage] for stage in STAGES}, WALL: wall_s}


def overhead_s(record: StepRecord, trace: Trace) -> tuple[float, float]:
    """Return the seconds of a recorded step in which no function worked: the driver's own, and those of cold starts."""
    worked = [(call.start_s, call.end_s) for call in trace.invocations]
    begin_s, end_s = record.resumed_s, record.end_s
    idle_s = end_s - begin_s - length(clip(union(worked), begin_s, end_s))
    busy = union((*worked, *cold_starts(trace.holdings)))
    driver_s = max(end_s - begin_s - length(clip(busy, begin_s, end_s)), 0.0)
    return driver_s, max(idle_s - driver_s, 0.0)


def means_s(steps: Sequence[tuple[StepRecord, Trace]]) -> dict[str, float]:
    """Return the mean seconds of each stage over the steps."""
    measured = [measured_s(*step) for step in steps]
    return {stage: fmean(each[stage] for each in measured) for stage in measured[0]}


def helper_cores(record: StepRecord, trace: Trace) -> float | None:
    """Return the CPU cores that other processes kept busy during generation, per core of an engine.

    The driver, Ray and scoring work on the engines' samples. None if the engines do not run on cores, or the trace
    lacks the load.
    """
    busy = record.metrics.get("host_busy_cores")
    if busy is None or not (cores := _cores(trace)):
        return None
    calls = _generated(record.step, trace.invocations)
    drawn_core_s = sum(call.duration_s * cores.get(call.replica, 0) for call in calls)
    if not drawn_core_s:
        return None
    return max(busy * length(union((call.start_s, call.end_s) for call in calls)) / drawn_core_s - 1, 0.0)


def drawn_s(step: int, invocations: Sequence[Invocation]) -> list[float]:
    """Return the seconds that each engine worked in a step."""
    seconds: dict[str, float] = defaultdict(float)
    for call in _generated(step, invocations):
        seconds[call.replica] += call.duration_s
    return list(seconds.values())


def shared_s(work_s: Sequence[float], helpers: float, cores: float) -> float:
    """Return the seconds until the last of several engines has ended, if all share a machine's cores equally.

    Each engine competes with `helpers` busy cores of other processes; on a core of its own it would work for `work_s`.
    """
    at_s = done_s = 0.0
    for ended, seconds in enumerate(sorted(work_s)):
        wanted = (len(work_s) - ended) * (1 + helpers)
        at_s += (seconds - done_s) * max(wanted / cores, 1.0)
        done_s = seconds
    return at_s


def machine_cores(trace: Trace) -> float | None:
    """Return the CPU cores of the machine if the engines run on them."""
    cores = trace.meta.machine.get("cpu_cores")
    return float(cores) if cores and _cores(trace) else None


def _generated(step: int, invocations: Sequence[Invocation]) -> list[Invocation]:
    return [call for call in invocations if call.step == step and call.work is Work.GENERATE]


def _cores(trace: Trace) -> Mapping[str, int]:
    """Return the CPU cores of each generation actor; none on other devices."""
    devices: dict[str, set[str]] = defaultdict(set)
    for holding in trace.holdings:
        if holding.function == FunctionName.GENERATION and holding.device_kind == CPU_KIND:
            devices[holding.replica].add(holding.device)
    return {name: len(held) for name, held in devices.items()}
