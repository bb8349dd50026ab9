"""Runs that come and go on one cluster: in order, on fixed parts, in turns, or elastic by the service's own decisions.

A run is its number of steps; seconds per step by number of devices are those of the scenario, simulated once per size.
An elastic run changes its size at the end of a step and then does nothing for the cost of the change; devices that it
gives up are free when the step has ended.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from pathlib import Path
from statistics import fmean

from rlhfless.scaling.sizes import SpeedCurve, sizes_up_to
from rlhfless.scaling.sizing import SizedRun, divide
from rlhfless.sim.experiment.run import ExperimentTask, FleetShape
from rlhfless.sim.experiment.run import run as simulated
from rlhfless.sim.experiment.shared import RunsAlone, share
from rlhfless.sim.scenarios.scenario import PolicyEntry, Scenario
from rlhfless.sim.scenarios.timing import DoesNotFit
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec import WeightedSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.fleet import MOST_TENANTS

CHANGE_S = 60.0
"""Default cost of a change: a restart from the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class ArrivingRun:
    """A run that comes to the cluster."""

    at_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class ClusterSpeeds:
    """The devices of a cluster, and a run's seconds per step by number of devices."""

    nodes: tuple[int, ...]
    curve: SpeedCurve

    @property
    def devices(self) -> int:
        return sum(self.nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.curve.step_s)

    @property
    def most_steps_per_s(self) -> float:
        """The greatest throughput of equal parts: load 1."""
        return max(self.devices // size / self.curve.at(size) for size in self.sizes)


@dataclass(frozen=True, slots=True)
class ArrivalRow:
    """How a way to place the runs did."""

    name: str
    by_alone: float
    """Mean of a run's seconds from arrival to end, by its seconds alone on the whole cluster."""
    mean_s: float
    """Mean seconds from a run's arrival to its end."""
    makespan_s: float
    """Seconds from the first arrival to the last end."""
    changes: int = 0
    """Changes of the size of runs that work."""
    unequal: bool = False
    """Whether it is a static division into unequal parts."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The ways to place the same arriving runs."""

    label: str
    static: tuple[ArrivalRow, ...]
    """A row per static division: all devices, equal parts, and the best of unequal parts."""
    turns: ArrivalRow | None
    elastic: ArrivalRow

    @property
    def best_static(self) -> ArrivalRow:
        """The division that is best in hindsight."""
        return min(self.static, key=lambda row: row.by_alone)

    @property
    def gain(self) -> float:
        """How many times sooner a run ends than with the best static division."""
        return self.best_static.by_alone / self.elastic.by_alone


def speeds_of(scenario: Scenario) -> ClusterSpeeds:
    """Simulate the scenario on each size that fits.

    Raises InputError for a cluster with several kinds of devices.
    """
    if len(scenario.cluster.machines) > 1:
        kinds = ", ".join(machines.kind for machines in scenario.cluster.machines)
        what, hint = f"runs share devices of one kind, and there are {kinds}", "leave all but one of them out"
        raise InputError(scenario.name, [Problem("cluster.machines", what, hint)])
    machines = scenario.cluster.machines[0]
    step_s = {}
    for size in sizes_up_to(machines.devices, machines.devices_per_node):
        fleet = FleetShape(ScenarioPlacementSpec(mode="colocated"), size)
        task = ExperimentTask(scenario, PolicyEntry(name="cost_aware"), fleet, (WeightedSpec(time_weight=1.0),), 0)
        try:
            steps = simulated(task).steps
        except DoesNotFit:
            continue
        warm = steps[1:] or steps
        step_s[size] = fmean(step.time_s for step in warm)
    return ClusterSpeeds((machines.devices_per_node,) * machines.nodes, SpeedCurve(step_s))


def turns_of(scenario: Scenario, speeds: ClusterSpeeds) -> dict[int, float]:
    """Return, by the number of runs that take turns on all devices, their steps per second together, relative to a run
    alone; empty if the scenario does not fit on all devices."""
    if speeds.devices not in speeds.sizes:
        return {}
    alone = RunsAlone(scenario)
    phases = alone.phases(FleetShape(ScenarioPlacementSpec(mode="colocated")), MOST_TENANTS, "all")
    one_by_one_s = list(accumulate(share([each]).makespan_s for each in phases))
    return {runs: one_by_one_s[runs - 1] / share(phases[:runs]).makespan_s for runs in range(1, MOST_TENANTS + 1)}


def poisson(speeds: ClusterSpeeds, load: float, runs: int, steps: Sequence[int], seed: int) -> list[ArrivingRun]:
    """Return runs that arrive at random. `load`: share of the cluster's greatest throughput that they need. `steps` are
    drawn with equal probability."""
    drawn = random.Random(seed)
    every_s = fmean(steps) / (load * speeds.most_steps_per_s)
    at_s, arriving = 0.0, []
    for _ in range(runs):
        arriving.append(ArrivingRun(at_s, drawn.choice(steps)))
        at_s += drawn.expovariate(1 / every_s)
    return arriving


def read_arrivals(path: Path) -> list[ArrivingRun]:
    """Read a CSV file with columns `at_s` and `steps`, one run a line. Raises InputError."""
    problems, arriving = [], []
    try:
        rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), [Problem("--arrivals", f"cannot be read: {error}", "name a CSV file")]) from error
    for line, row in enumerate(rows, 2):
        try:
            at_s, steps = float(row["at_s"] or ""), int(row["steps"] or "")
            if not (0 <= at_s < math.inf and steps >= 1):
                raise ValueError(f"at_s is {at_s:g} and steps {steps}")
            arriving.append(ArrivingRun(at_s, steps))
        except (KeyError, TypeError, ValueError) as error:
            hint = "give columns at_s (seconds, at least 0) and steps (at least 1)"
            problems.append(Problem(f"line {line}", str(error), hint))
    if not rows:
        problems.append(Problem("--arrivals", "has no runs", "give a header at_s,steps and a line per run"))
    if problems:
        raise InputError(str(path), problems)
    return sorted(arriving, key=lambda run: run.at_s)


def compare_arrivals(
    label: str,
    speeds: ClusterSpeeds,
    arriving: Sequence[ArrivingRun],
    change_s: float = CHANGE_S,
    turns: Mapping[int, float] | None = None,
) -> Arrivals:
    """Compare the ways to place the runs. `turns` is that of `turns_of`."""
    rows = [in_parts(speeds, arriving, parts) for parts in divisions(speeds)]
    static = [row for row in rows if not row.unequal]
    if unequal := [row for row in rows if row.unequal]:
        static.append(min(unequal, key=lambda row: row.by_alone))
    in_turn = in_turns(speeds, arriving, turns) if turns else None
    return Arrivals(label, tuple(static), in_turn, elastic(speeds, arriving, change_s))


def divisions(speeds: ClusterSpeeds) -> list[tuple[int, ...]]:
    """Return the static divisions of the whole cluster into parts of sizes that divide it, fewest parts first."""
    sizes = sorted((size for size in speeds.sizes if speeds.devices % size == 0), reverse=True)

    def fill(left: int, below: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for size in sizes:
            if size <= min(left, below):
                yield from ((size, *rest) for rest in fill(left - size, size))

    return sorted(fill(speeds.devices, speeds.devices), key=lambda parts: (len(parts), parts))


def in_parts(speeds: ClusterSpeeds, arriving: Sequence[ArrivingRun], parts: Sequence[int]) -> ArrivalRow:
    """Each run waits for a part, and keeps it to its end. The first in the queue gets the largest free part."""
    free = [-part for part in parts]
    heapq.heapify(free)
    busy: list[tuple[float, int]] = []
    ends = []
    for run in arriving:
        begins_s = run.at_s
        while busy and (not free or busy[0][0] <= run.at_s):
            free_s, part = heapq.heappop(busy)
            begins_s = max(begins_s, free_s)
            heapq.heappush(free, part)
        part = heapq.heappop(free)
        ends.append(begins_s + run.steps * speeds.curve.at(-part))
        heapq.heappush(busy, (ends[-1], part))
    return replace(_row(_named(parts), speeds, arriving, ends), unequal=len(set(parts)) > 1)


def _named(parts: Sequence[int]) -> str:
    if len(parts) == 1:
        return "one by one"
    if len(set(parts)) == 1:
        return f"{len(parts)} parts"
    counts = Counter(parts).items()
    return " + ".join(f"{number} x {size}" if number > 1 else str(size) for size, number in counts)


def in_turns(speeds: ClusterSpeeds, arriving: Sequence[ArrivingRun], together: Mapping[int, float]) -> ArrivalRow:
    """Up to as many runs as may take turns work on all devices; each gets an equal part of their steps."""
    step_s, most = speeds.curve.at(speeds.devices), max(together)
    left: dict[int, float] = {}
    queue: list[int] = []
    ends = [0.0] * len(arriving)
    now_s, following = 0.0, 0
    while following < len(arriving) or left:
        pace = together[len(left)] / len(left) / step_s if left else 0.0
        first_s = now_s + min(left.values()) / pace if left else math.inf
        comes_s = arriving[following].at_s if following < len(arriving) else math.inf
        until_s = min(first_s, comes_s)
        left = {run: steps - pace * (until_s - now_s) for run, steps in left.items()}
        now_s = until_s
        if comes_s <= first_s:
            queue.append(following)
            following += 1
        else:
            done = min(left, key=lambda run: left[run])
            del left[done]
            ends[done] = now_s
        while queue and len(left) < most:
            started = queue.pop(0)
            left[started] = float(arriving[started].steps)
    return _row("in turns", speeds, arriving, ends)


def _row(
    name: str, speeds: ClusterSpeeds, arriving: Sequence[ArrivingRun], ends: Sequence[float], changes: int = 0
) -> ArrivalRow:
    spent_s = [end_s - run.at_s for run, end_s in zip(arriving, ends, strict=True)]
    alone_s = speeds.curve.at(speeds.devices)
    by_alone = fmean(spent / (run.steps * alone_s) for run, spent in zip(arriving, spent_s, strict=True))
    return ArrivalRow(name, by_alone, fmean(spent_s), max(ends) - arriving[0].at_s, changes)


def elastic(speeds: ClusterSpeeds, arriving: Sequence[ArrivingRun], change_s: float) -> ArrivalRow:
    """Sizes by `rlhfless.scaling.sizing.divide`, decided whenever a run comes, ends, or has given devices up."""
    cluster = _ElasticCluster(speeds, arriving, change_s)
    ends = cluster.ends()
    return _row("elastic", speeds, arriving, ends, cluster.changes)


@dataclass
class _Working:
    """A run with devices."""

    number: int
    steps_left: int
    """At `since_s`."""
    size: int
    """Devices with which it works."""
    granted: int
    """Devices that it has from the end of its step on."""
    since_s: float
    """When its next step begins, or began."""
    version: int = 0
    """Counts changes, so that outdated events are ignored."""


@dataclass
class _ElasticCluster:
    speeds: ClusterSpeeds
    arriving: Sequence[ArrivingRun]
    change_s: float
    changes: int = 0
    working: dict[int, _Working] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = count()
        self._events: list[tuple[float, int, str, int, int]] = []
        self._ends = [0.0] * len(self.arriving)
        for number, run in enumerate(self.arriving):
            self._add(run.at_s, "comes", number, 0)

    def ends(self) -> list[float]:
        """Return when each run ends."""
        while self._events:
            now_s, _, what, number, version = heapq.heappop(self._events)
            if what == "comes":
                self.waiting.append(number)
            else:
                run = self.working.get(number)
                if run is None or run.version != version:
                    continue
                if what == "ends":
                    self._ends[number] = now_s
                    del self.working[number]
                else:
                    self._change(run, now_s)
            if not self._events or self._events[0][0] > now_s:
                self._decide(now_s)
        return self._ends

    def _add(self, at_s: float, what: str, number: int, version: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, number, version))

    def _decide(self, now_s: float) -> None:
        sizes, curve = self.speeds.sizes, self.speeds.curve
        runs = [
            SizedRun(str(run.number), sizes, curve, self._left(run, now_s), run.granted, self.change_s)
            for run in self.working.values()
        ]
        runs += [SizedRun(str(number), sizes, curve, self.arriving[number].steps) for number in self.waiting]
        division = divide(runs, self.speeds.nodes).sizes
        shrinking = [run for run in self.working.values() if division[str(run.number)] < run.granted]
        growing = [run for run in self.working.values() if division[str(run.number)] > run.granted]
        for run in shrinking:
            self._grant(run, division[str(run.number)], now_s)
        free = self.speeds.devices - sum(max(run.size, run.granted) for run in self.working.values())
        for number in list(self.waiting):
            if 0 < (size := division[str(number)]) <= free:
                free -= size
                self.waiting.remove(number)
                self.working[number] = _Working(number, self.arriving[number].steps, size, size, now_s)
                self._schedule(self.working[number])
        for run in growing:
            if (size := division[str(run.number)]) - run.granted <= free:
                free -= size - run.granted
                self._grant(run, size, now_s)

    def _left(self, run: _Working, now_s: float) -> float:
        return run.steps_left - max(now_s - run.since_s, 0.0) / self.speeds.curve.at(run.size)

    def _grant(self, run: _Working, size: int, now_s: float) -> None:
        """Change a run's size at the end of its step."""
        run.granted = size
        run.version += 1
        self._schedule(run, now_s)

    def _schedule(self, run: _Working, now_s: float | None = None) -> None:
        step_s = self.speeds.curve.at(run.size)
        if run.granted == run.size or now_s is None:
            self._add(run.since_s + run.steps_left * step_s, "ends", run.number, run.version)
            return
        steps = math.ceil(max(now_s - run.since_s, 0.0) / step_s - 1e-9)
        if steps >= run.steps_left:  # its last step
            self._add(run.since_s + run.steps_left * step_s, "ends", run.number, run.version)
        else:
            self._add(run.since_s + steps * step_s, "changes", run.number, run.version)

    def _change(self, run: _Working, now_s: float) -> None:
        step_s = self.speeds.curve.at(run.size)
        run.steps_left -= round(max(now_s - run.since_s, 0.0) / step_s)
        run.size, run.since_s = run.granted, now_s + self.change_s
        run.version += 1
        self.changes += 1
        self._schedule(run)
