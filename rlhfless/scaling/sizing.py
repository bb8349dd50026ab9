"""Decides how many devices each run of a cluster has. Pure: runs and nodes in, sizes with reasons out.

The broker of a service and the simulator of arriving runs call `divide` whenever a run comes, ends, pauses or changes,
and whenever a node comes or goes. In this order:

1. A run that works keeps its `min`. Waiting runs start in the order given, each with its `min`, as long as that fits;
   none overtakes the first that does not fit, unless that one waits for its own team. Others shrink for them. A
   single waiting run waits on if starting it would do less work, as where speed is nearly proportional to devices and
   a run is about to end.
2. A run whose contract has a deadline gets the fewest devices that keep it.
3. Other devices go, one size at a time, to the run that gains most per device. A run's gain is the work that it does
   per second, in seconds of the run at its largest size, times its weight. The weight grows with the run's priority
   and with the number of runs that have more work left: a short run delays few others, and its devices soon return.
   Teams get their shares of the devices first, and what others leave after that.
4. Nothing changes unless it pays. The division of 3 is compared with divisions in which some or all runs keep their
   sizes, by the work done until the first run ends, without the work lost in the changes.

The weights are those of heSRPT, optimal for a fixed set of runs whose speed grows with a common power of their devices
(Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020), at a part of that power (ORDER_SHARE).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rlhfless.scaling.sizes import SpeedCurve

LEVEL_FACTOR = 2.0
"""Factor of a run's weight per level of priority."""

MOST_ROUNDS = 8
"""Most times that a division is improved on. Two are usual."""

ORDER_SHARE = 0.25
"""Share of the exponent of speed by devices that counts in the weights: 0 treats all runs alike, 1 is best if no run
comes later. In the table of docs/simulate.md, of 0, 0.25, 0.5 and 1, this one has the best worst row."""


@dataclass(frozen=True)
class SizedRun:
    """A run that works or waits for devices."""

    run_id: str
    sizes: tuple[int, ...]
    """Numbers of devices that it may have, fewest first: `min` to `max`."""
    curve: SpeedCurve
    steps_left: float
    size: int = 0
    """Devices that it has; 0 while it waits."""
    change_s: float = 0.0
    """Seconds that a change of its size costs."""
    needed: int = 0
    """Fewest devices that keep the deadline of its contract; 0 without one."""
    priority: float = 0.0
    team: str = ""

    def speed(self, size: int) -> float:
        """Return the work per second, in seconds at the largest size."""
        return self.curve.at(self.sizes[-1]) / self.curve.at(size) if size else 0.0

    @cached_property
    def work_s(self) -> float:
        """Seconds that its steps would take at the largest size."""
        return self.steps_left * self.curve.at(self.sizes[-1])

    def left_s(self, size: int) -> float:
        """Return the seconds until it ends at a size; infinite if unknown."""
        return self.work_s / self.speed(size) if size and self.curve.step_s else math.inf


@dataclass(frozen=True, slots=True)
class Team:
    """What the runs of one team may have together."""

    weight: float = 1.0
    """Its share of the devices, by those of the teams that have runs. Devices beyond it are borrowed: they go back
    first."""
    max_devices: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The sizes of all runs, with the reason of each change."""

    sizes: Mapping[str, int]
    """By run id; 0 for a run that waits."""
    reasons: Mapping[str, str]
    """By run id, for runs whose size changes, or would change if it were worth the cost."""


def divide(
    runs: Sequence[SizedRun], nodes: Sequence[int], teams: Mapping[str, Team] | None = None, most: int = 0
) -> Division:
    """Return the size of each run.

    `runs` are in the order in which they are served if they wait. `nodes` has the number of devices of each node.
    `most`: devices that there may be, if nodes can be added; a run that waits for these is not overtaken either.
    Raises ValueError if the runs that work do not fit at their `min`.
    """
    cluster = _Cluster(runs, nodes, teams or {}, max(most, sum(nodes)))
    has = {run.run_id: run.size for run in runs}
    now = has
    for _ in range(MOST_ROUNDS):  # what is best now may make room for something better
        before, now = now, _worth_changing(cluster, now)
        if now == before:
            break
    return Division(now, {run.run_id: reason for run in runs if (reason := _reason(cluster, run, has, now))})


@dataclass
class _Cluster:
    runs: Sequence[SizedRun]
    nodes: Sequence[int]
    teams: Mapping[str, Team]
    most: int
    """Devices that there may be."""
    gains: dict[str, float] = field(init=False)
    """Weight of each run in the work done."""

    def __post_init__(self) -> None:
        self.gains = weights(self.runs)
        self.steps = sorted(self._steps(), key=lambda step: (-step.gain, step.run.run_id))

    @property
    def devices(self) -> int:
        return sum(self.nodes)

    def _steps(self) -> Iterable[_Step]:
        """Yield the changes from each size to the next that gains most per device."""
        for run in self.runs:
            size = run.sizes[0]
            while larger := [each for each in run.sizes if each > size]:
                following = max(larger, key=lambda each: ((run.speed(each) - run.speed(size)) / (each - size), -each))
                gain = (run.speed(following) - run.speed(size)) / (following - size)
                if gain <= 0:
                    break
                yield _Step(run, size, following, self.gains[run.run_id] * gain)
                size = following

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Return whether runs of these sizes fit on the nodes: in one node each, or on whole nodes."""
        if sum(sizes.values()) > self.devices:
            return False
        return len(self.nodes) == 1 or packs(sizes.values(), self.nodes)

    @cached_property
    def known(self) -> bool:
        """Whether the seconds per step of all runs are known."""
        return all(run.curve.step_s for run in self.runs)

    def admits(self, sizes: Mapping[str, int], team: str) -> bool:
        return self.fits(sizes) and self.within_quotas(sizes, team, borrowing=True)

    def within_quotas(self, sizes: Mapping[str, int], team: str, *, borrowing: bool) -> bool:
        quota = self.teams.get(team, _NO_QUOTA)
        taken = sum(sizes[run.run_id] for run in self.runs if run.team == team)
        if quota.max_devices is not None and taken > quota.max_devices:
            return False
        return borrowing or taken <= self.shares[team]

    @cached_property
    def shares(self) -> dict[str, float]:
        """Devices that each team with runs need not borrow."""
        weights = {run.team: self.teams.get(run.team, _NO_QUOTA).weight for run in self.runs}
        whole = sum(weights.values())
        return {team: self.devices * weight / whole for team, weight in weights.items()}

    def first_end_s(self, now: Mapping[str, int]) -> float:
        """Return the seconds until the first run ends."""
        return min((run.left_s(now[run.run_id]) for run in self.runs), default=math.inf)


@dataclass(frozen=True, slots=True)
class _Step:
    run: SizedRun
    size: int
    following: int
    gain: float
    """Weighted work per second and device."""


_NO_QUOTA = Team()


def packs(sizes: Iterable[int], nodes: Sequence[int]) -> bool:
    """Return whether each size fits on one node; if larger than a node, on whole nodes and a part of one more."""
    largest, free, parts = max(nodes, default=0), sorted(nodes), list[int]()
    for size in sizes:
        left = size
        while left >= largest > 0:
            if not free or free[-1] < largest:
                return False
            left -= free.pop()
        parts.append(left)
    for size in sorted(filter(None, parts), reverse=True):  # each into the fullest node that has room
        place = next((index for index, left in enumerate(free) if left >= size), None)
        if place is None:
            return False
        free[place] -= size
        free.sort()
    return True


def weights(runs: Sequence[SizedRun]) -> dict[str, float]:
    """Return the weight of each run: with runs in order of the work left by level of priority, most first, and
    exponent p of speed by devices, (z^q - y^q)^(1/q) with q = 1 / (1 - ORDER_SHARE p), where z sums the levels up to
    the run, and y those before it. If the seconds of a run are unknown, so is the order, and weights are the levels."""
    levels = {run.run_id: LEVEL_FACTOR**run.priority for run in runs}
    if not all(run.curve.step_s for run in runs):
        return levels
    exponents = [
        math.log(run.speed(run.sizes[-1]) / run.speed(run.sizes[0])) / math.log(run.sizes[-1] / run.sizes[0])
        for run in runs
        if len(run.sizes) > 1
    ]
    exponent = min(max(sum(exponents) / max(len(exponents), 1), 0.0), 1.0)
    power = 1 / (1 - ORDER_SHARE * exponent)
    found, before = {}, 0.0
    for _, run in sorted(enumerate(runs), key=lambda each: (-each[1].work_s / levels[each[1].run_id], -each[0])):
        after = before + levels[run.run_id]
        found[run.run_id] = (after**power - before**power) ** (1 / power)
        before = after
    return found


def _worth_changing(cluster: _Cluster, now: Mapping[str, int]) -> dict[str, int]:
    """Return the best division in view of what it costs to change from `now`."""
    works = [run for run in cluster.runs if now[run.run_id]]
    kept = {run.run_id: now[run.run_id] for run in works}
    best = _divided(cluster, {}, now, len(cluster.runs))
    if best is None:
        raise ValueError(f"runs {', '.join(kept)} do not fit at their min on {cluster.devices} devices")
    chosen, starts, value = best, len(cluster.runs), _value(cluster, best, now)
    if cluster.known and len(cluster.runs) - len(works) == 1:
        division = _divided(cluster, {}, now, 0)
        if division is not None and (worth := _value(cluster, division, now)) > value:
            chosen, value, starts = division, worth, 0
    moves = {
        run.run_id: abs(run.speed(chosen[run.run_id]) - run.speed(now[run.run_id]))
        for run in works
        if chosen[run.run_id] != now[run.run_id]
    }
    frozen: dict[str, int] = {}
    for run_id in sorted(moves, key=lambda run_id: moves[run_id]):
        for candidate in ({**frozen, run_id: now[run_id]}, kept):
            division = _divided(cluster, candidate, now, starts)
            if division is not None and (worth := _value(cluster, division, now)) >= value:
                chosen, value, frozen = division, worth, candidate
    return chosen


def _value(cluster: _Cluster, sizes: Mapping[str, int], now: Mapping[str, int]) -> tuple[int, float]:
    """Return the number of deadlines that are kept, and the weighted work until the first run ends, without that lost
    in changes from `now`; the work is per second if the end is unknown."""
    kept = sum(sizes[run.run_id] >= run.needed for run in cluster.runs)
    until_s, work = cluster.first_end_s(now), 0.0
    for run in cluster.runs:
        changes = now[run.run_id] and sizes[run.run_id] != now[run.run_id]
        share = 1.0 if math.isinf(until_s) else max(until_s - run.change_s * bool(changes), 0.0)
        work += cluster.gains[run.run_id] * run.speed(sizes[run.run_id]) * share
    return kept, work


def _divided(
    cluster: _Cluster, frozen: Mapping[str, int], now: Mapping[str, int], starts: int
) -> dict[str, int] | None:
    """Return the division by gains in which the runs of `frozen` keep these sizes, and at most `starts` runs start.

    Returns None if the former do not fit, or if one of the latter could start only without them.
    """
    sizes = _at_least(cluster, frozen, now, starts)
    if sizes is None:
        return None
    _grow_to_deadlines(cluster, sizes, frozen)
    steps = [step for step in cluster.steps if step.run.run_id not in frozen]
    for borrowing in (False, True) if len(cluster.shares) > 1 else (True,):
        for step in steps:
            if step.size <= sizes[step.run.run_id] < step.following:
                _grow(cluster, sizes, step.run, step.following, borrowing=borrowing)
        for step in steps:  # where the best step does not fit
            for size in reversed(step.run.sizes):
                if step.size <= sizes[step.run.run_id] < size < step.following:
                    _grow(cluster, sizes, step.run, size, borrowing=borrowing)
    return sizes


def _at_least(
    cluster: _Cluster, frozen: Mapping[str, int], now: Mapping[str, int], starts: int
) -> dict[str, int] | None:
    """Return the sizes of `frozen`, and the `min` of the other runs that work or start; None as `_divided`."""
    least = {run.run_id: run.sizes[0] if now[run.run_id] else 0 for run in cluster.runs}
    sizes = {**least, **frozen}
    if not cluster.fits(sizes):
        return None
    for run in (run for run in cluster.runs if not now[run.run_id]):
        if not starts:
            break
        least[run.run_id] = sizes[run.run_id] = run.sizes[0]
        if cluster.admits(least, run.team):
            if not cluster.admits(sizes, run.team):
                return None
            starts -= 1
            continue
        waits_for_others = cluster.within_quotas(least, run.team, borrowing=True)
        least[run.run_id] = sizes[run.run_id] = 0
        if waits_for_others and run.sizes[0] <= cluster.most:
            break  # no run behind it overtakes it
    return sizes


def _grow_to_deadlines(cluster: _Cluster, sizes: dict[str, int], frozen: Mapping[str, int]) -> None:
    late = [run for run in cluster.runs if 0 < sizes[run.run_id] < run.needed and run.run_id not in frozen]
    for run in sorted(late, key=lambda run: (-run.priority, run.run_id)):
        for size in run.sizes:
            if sizes[run.run_id] < size <= run.needed:
                _grow(cluster, sizes, run, size, borrowing=True)


def _grow(cluster: _Cluster, sizes: dict[str, int], run: SizedRun, size: int, *, borrowing: bool) -> None:
    """Set the size of a run that works if it is faster there, and if all sizes then fit."""
    before = sizes[run.run_id]
    if not before or run.speed(size) <= run.speed(before):
        return
    sizes[run.run_id] = size
    if not cluster.fits(sizes) or not cluster.within_quotas(sizes, run.team, borrowing=borrowing):
        sizes[run.run_id] = before


def _reason(cluster: _Cluster, run: SizedRun, has: Mapping[str, int], gets: Mapping[str, int]) -> str:
    """Return why a run's size changes; empty if it does not."""
    before, after = has[run.run_id], gets[run.run_id]
    if before == after:
        return ""
    known = bool(run.curve.step_s)
    step = f", {run.curve.at(after):.3g} s a step" if known and after else ""
    if not before:
        return f"starts on {after} device(s){step}"
    started = [other.run_id for other in cluster.runs if gets[other.run_id] and not has[other.run_id]]
    larger = [other.run_id for other in cluster.runs if gets[other.run_id] > has[other.run_id] > 0]
    if known:
        step = f", {run.curve.at(before):.3g} -> {run.curve.at(after):.3g} s a step"
    if after > before:
        why = "they gain most here"
    elif started:
        why = f"{', '.join(started)} can start"
    else:
        why = f"they gain more in {', '.join(larger)}" if larger else "there are fewer devices"
    return f"{before} -> {after} devices: {why}{step}"
