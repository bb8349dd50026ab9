"""Arrange several runs of a scenario on one cluster: sequentially, on separate parts, in turns by phase, or, if they
train adapters, with shared engines (rlhfless.sim.experiment.fleets).

Each run is simulated alone on its devices, with its own seed; turns consist of its phases. With turns, the reference
works after generation, although it may start earlier alone where it has devices of its own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, count, groupby
from operator import attrgetter

from rlhfless.records import FunctionName, Invocation, StepRecord, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.policies.contract import keeps
from rlhfless.scaling.turn_scheduler import TurnScheduler
from rlhfless.sim.experiment.contracts import span_of
from rlhfless.sim.experiment.fleets import FleetEngine, FleetStep, share_engines
from rlhfless.sim.experiment.run import ExperimentTask, FleetShape, layout_of
from rlhfless.sim.experiment.run import run as simulated
from rlhfless.sim.scenarios.build import ScenarioLayout
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.scenarios.scenario import CheapestContract, PolicyEntry, Scenario
from rlhfless.sim.scenarios.timing import DoesNotFit, learner_devices_needed
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec import CheapestSpec, WeightedSpec
from rlhfless.spec.errors import InputError, Problem

AFTER = (Work.LOGPROBS, Work.EVALUATE, Work.LEARN, Work.PUBLISH)

ONE_BY_ONE = "one after the other"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to place several runs on one cluster."""

    name: str
    makespan_s: float
    """Seconds until all runs have ended."""
    mean_end_s: float
    """Mean seconds until a run has ended."""
    used: float
    """Share of the devices' time in which a function worked on them, whether or not it used them all."""
    kept: float | None = None
    """Share of the runs that keep the scenario's deadline; None without a deadline in seconds."""


def arrangements(scenario: Scenario, counts: Sequence[int]) -> dict[int, list[Arrangement]]:
    """Return, for each number of runs, all arrangements that fit, `ONE_BY_ONE` first.

    Raises InputError for a cluster with several kinds of devices.
    """
    if len(scenario.cluster.machines) > 1:
        kinds = ", ".join(machines.kind for machines in scenario.cluster.machines)
        what, hint = f"runs share devices of one kind, and there are {kinds}", "leave all but one of them out"
        raise InputError(scenario.name, [Problem("cluster.machines", what, hint)])
    alone = RunsAlone(scenario)
    return {runs: list(_Arranger(alone, runs).all()) for runs in counts}


class RunsAlone:
    """Simulates runs of a scenario, each alone on a fleet, and caches their traces."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.devices = scenario.cluster.machines[0].devices
        self._traces: dict[tuple[str, int], Trace] = {}

    def phases(self, fleet: FleetShape, runs: int, group: str | None) -> list[list[PhaseWork]]:
        """Return the phases of `runs` runs with different seeds. Raises DoesNotFit."""
        layout = layout_of(self.scenario, fleet)
        return [list(_phases(self._trace(fleet, seed), layout, group)) for seed in range(runs)]

    def _trace(self, fleet: FleetShape, seed: int) -> Trace:
        key = repr(fleet), seed
        if key not in self._traces:
            entry, contract = PolicyEntry(name="cost_aware"), (WeightedSpec(time_weight=1.0),)
            trace = simulated(ExperimentTask(self.scenario, entry, fleet, contract, seed, True)).trace
            assert trace is not None  # requested by the task
            self._traces[key] = trace
        return self._traces[key]


class _Arranger:
    """The arrangements of `runs` runs on the cluster."""

    def __init__(self, alone: RunsAlone, runs: int) -> None:
        self._alone = alone
        self._devices = alone.devices
        self._runs = runs

    def all(self) -> Iterator[Arrangement]:
        whole = self._alone.phases(FleetShape(_COLOCATED), self._runs, "all")
        alone_s = [share([phases]).makespan_s for phases in whole]
        yield self._arrangement(ONE_BY_ONE, list(accumulate(alone_s)), whole, took_s=alone_s)
        for tenants in range(self._runs, 0, -1):
            parts, rest = divmod(self._runs, tenants)
            if rest == 0 and (made := self._parts(parts, tenants)) is not None:
                yield made
        if (apart := self._apart()) is not None:
            yield apart
        if self._alone.scenario.learner.adapters and self._runs > 1:
            fleets = [made for learner in self._learner_sizes() if (made := self._fleet(learner)) is not None]
            if fleets:
                yield min(fleets, key=attrgetter("makespan_s"))

    def _parts(self, parts: int, tenants: int) -> Arrangement | None:
        """Divide the cluster into `parts` equal parts of `tenants` runs in turns; None if a run does not fit."""
        size = self._devices // parts
        name = f"{parts} parts of {size} devices" if parts > 1 else "all devices"
        name += f", {tenants} runs in turns on each" if tenants > 1 and parts > 1 else ", in turns" * (tenants > 1)
        try:
            runs = self._alone.phases(FleetShape(_COLOCATED, size), self._runs, "all")
        except DoesNotFit:
            return None
        ends = [end for part in range(parts) for end in share(runs[part * tenants : (part + 1) * tenants]).ends_s]
        return self._arrangement(name, ends, runs, parts)

    def _apart(self) -> Arrangement | None:
        """Separate the devices of actors and learners, with all runs in turns; None if a run does not fit."""
        scenario = self._alone.scenario
        needed = learner_devices_needed(scenario, scenario.cluster.machines[0].kind)
        learner = max(needed, -(-self._devices // 2))
        placement = ScenarioPlacementSpec(mode="disaggregated", learner_devices=learner)
        try:
            runs = self._alone.phases(FleetShape(placement), self._runs, None)
        except DoesNotFit:
            return None
        timeline = share(runs)
        name = f"{self._devices - learner} devices for actors, {learner} for learners, in turns"
        used = sum(timeline.busy_s.values()) / (2 * timeline.makespan_s)
        mean_end_s = sum(timeline.ends_s) / self._runs
        return Arrangement(name, timeline.makespan_s, mean_end_s, used, self._kept(timeline.ends_s))

    def _learner_sizes(self) -> list[int]:
        """Return the numbers of learner devices with which fleets are tried."""
        scenario = self._alone.scenario
        needed = learner_devices_needed(scenario, scenario.cluster.machines[0].kind)
        sizes = {needed, *(-(-self._devices * quarter // 4) for quarter in (1, 2, 3))}
        return sorted(size for size in sizes if needed <= size < self._devices)

    def _fleet(self, learner: int) -> Arrangement | None:
        """Share engines token by token, with learners in turns; None if a run does not fit."""
        scenario = self._alone.scenario
        shape = FleetShape(ScenarioPlacementSpec(mode="disaggregated", learner_devices=learner))
        try:
            phases = self._alone.phases(shape, self._runs, None)
        except DoesNotFit:
            return None
        layout = layout_of(scenario, shape)
        engines = [
            FleetEngine(each.prices.model, each.engine.max_sequences, each.engine.kv_blocks * each.engine.block_tokens)
            for each in layout.actors()
        ]
        steps = [
            [
                FleetStep(batch, learned.work_s, learned.before_s)
                for batch, learned in zip(batches(scenario, seed), of_run[1::2], strict=False)
            ]
            for seed, of_run in enumerate(phases)
        ]
        slot = layout.learner().slot_setup
        timeline = share_engines(steps, engines, slot.sleep_s, slot.wake_s)
        made_s = timeline.makespan_s
        of_engines = sum(timeline.engines_busy_s) / len(engines) * (self._devices - learner)
        used = (of_engines + timeline.learning_s * learner) / (made_s * self._devices)
        name = f"{self._devices - learner} devices for engines shared by adapters, {learner} for learners in turns"
        mean_end_s = sum(timeline.ends_s) / self._runs
        return Arrangement(name, made_s, mean_end_s, used, self._kept(timeline.ends_s))

    def _arrangement(
        self,
        name: str,
        ends: Sequence[float],
        runs: Sequence[Sequence[PhaseWork]],
        parts: int = 1,
        took_s: Sequence[float] | None = None,
    ) -> Arrangement:
        worked_s = sum(phase.work_s for phases in runs for phase in phases)
        used, kept = worked_s / (max(ends) * parts), self._kept(took_s or ends)
        return Arrangement(name, max(ends), sum(ends) / len(ends), used, kept)

    def _kept(self, took_s: Sequence[float]) -> float | None:
        """Return the share of runs that keep the deadlines of all their steps together; None without deadlines."""
        scenario = self._alone.scenario
        contract = scenario.contract
        if not isinstance(contract, CheapestContract) or contract.deadline_s is None:
            return None
        spec = CheapestSpec(deadline_s=contract.deadline_s, per="run")
        limit = contract.deadline_s * -(-scenario.steps // span_of(contract, scenario))
        return sum(keeps(spec, each, 0.0, limit) is True for each in took_s) / len(took_s)


_COLOCATED = ScenarioPlacementSpec(mode="colocated")


def _phases(trace: Trace, layout: ScenarioLayout, group: str | None) -> Iterator[PhaseWork]:
    """Yield two phases per step.

    `group`: the group that all functions share; None: actors and learner have their own.
    """
    actor, learner = layout.actors()[0].slot_setup, layout.learner().slot_setup
    ordered = sorted(trace.invocations, key=attrgetter("step"))
    calls = {step: list(group) for step, group in groupby(ordered, key=attrgetter("step"))}
    for record in trace.steps:
        drawn_s, scored_s, after_s = _spent_s(calls[record.step], record)
        groups = frozenset({group or "actors"})
        yield PhaseWork(FunctionName.GENERATION, groups, drawn_s, 0.0, actor.sleep_s, actor.wake_s)
        groups = frozenset({group or "learner"})
        yield PhaseWork(FunctionName.LEARNER, groups, after_s, scored_s, learner.sleep_s, learner.wake_s)


def _spent_s(calls: Sequence[Invocation], record: StepRecord) -> tuple[float, float, float]:
    """Return the seconds of generation, of scoring after it, and of reference and learner in one step.

    Generation lasts from the first load of weights to the last token, scoring from there until all samples are scored.
    Actors that all start during the step load the weights as a part of their start, which is not counted.
    """
    begun_s = min(call.start_s for call in calls if call.work in (Work.LOAD_WEIGHTS, Work.GENERATE))
    drawn_s = record.start_s + record.metrics["generation_s"]
    scored_s = max((call.end_s for call in calls if call.work is Work.SCORE), default=drawn_s)
    return drawn_s - begun_s, max(scored_s - drawn_s, 0.0), sum(c.duration_s for c in calls if c.work in AFTER)


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase: a function's work in one step on its device groups."""

    function: str
    groups: frozenset[str]
    """Devices, or groups of them, that it needs together."""
    work_s: float
    before_s: float = 0.0
    """Work on no device after the end of the run's previous phase, such as scoring on CPU cores."""
    sleep_s: float = 0.0
    wake_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedTimeline:
    """When runs that shared devices ended, and how long each device worked."""

    ends_s: tuple[float, ...]
    """By run: when its last phase ended."""
    busy_s: Mapping[str, float]
    """By group: seconds in which a phase worked there."""

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s, default=0.0)


def share(runs: Sequence[Sequence[PhaseWork]]) -> SharedTimeline:
    """Simulate runs of equal priority that all start at once.

    Raises ValueError for a run with two phases whose groups overlap and differ: in a live run, functions that share
    devices, directly or through another function, have their turn on all of these devices together.
    """
    for run in runs:
        for first, second in combinations(sorted({phase.groups for phase in run}, key=sorted), 2):
            if first & second:
                raise ValueError(f"one phase needs {sorted(first)}, and another {sorted(second)}; give both the same")
    return _SharedRuns(runs).timeline()


class _SharedRuns:
    """The state of all runs: each is between two phases, waits for its turn, is in a phase, or has ended."""

    def __init__(self, runs: Sequence[Sequence[PhaseWork]]) -> None:
        self._runs = runs
        self._turns = TurnScheduler()
        self._next = [0] * len(runs)
        self._awake: dict[str, tuple[int, PhaseWork]] = {}
        """By group: the run whose function is awake there, and that function's last phase."""
        self._waiting: set[int] = set()
        self._working: set[str] = set()
        """Device groups with a phase in progress."""
        self._falling: dict[str, int] = {}
        """By group whose function is falling asleep: its run."""
        self._ends_s = [0.0] * len(runs)
        self._busy_s: dict[str, float] = defaultdict(float)
        self._events: list[tuple[float, int, str, int, frozenset[str]]] = []
        self._order = count()

    def timeline(self) -> SharedTimeline:
        for run in range(len(self._runs)):
            self._after(run, 0.0)
        while self._events:
            at_s = self._events[0][0]
            while self._events and self._events[0][0] == at_s:
                _, _, what, run, groups = heapq.heappop(self._events)
                if what == "ask":
                    self._waiting.add(run)
                elif what == "end":
                    self._working -= groups
                    self._after(run, at_s)
                else:
                    self._asleep(run, groups, at_s)
            self._go_on(at_s)
        return SharedTimeline(tuple(self._ends_s), dict(self._busy_s))

    def _add(self, at_s: float, what: str, run: int, groups: Iterable[str] = ()) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, run, frozenset(groups)))

    def _after(self, run: int, at_s: float) -> None:
        """End a phase of a run, which then requests its next turn or has ended."""
        if self._next[run] < len(self._runs[run]):
            self._add(at_s + self._runs[run][self._next[run]].before_s, "ask", run)
        else:
            self._ends_s[run] = at_s

    def _go_on(self, at_s: float) -> None:
        """Start all phases whose turn it is.

        A run falls asleep on groups where it does not work and another run waits.
        """
        for run in sorted(self._waiting):
            phase = self._runs[run][self._next[run]]
            falls_asleep = any(self._falling.get(group) == run for group in phase.groups)
            if not falls_asleep and self._turns.ask(str(run), phase.groups, 0, at_s):
                self._begin(run, phase, at_s)
        resting: dict[int, list[str]] = defaultdict(list)
        for group, (run, _) in self._awake.items():
            if group not in self._working and group not in self._falling:
                resting[run].append(group)
        for run, groups in resting.items():
            if self._turns.wanted(str(run), groups):
                self._falling |= dict.fromkeys(groups, run)
                self._add(at_s + max(self._awake[group][1].sleep_s for group in groups), "asleep", run, groups)

    def _begin(self, run: int, phase: PhaseWork, at_s: float) -> None:
        self._waiting.discard(run)
        self._working |= phase.groups
        self._next[run] += 1
        before = [self._awake[group] for group in sorted(phase.groups) if group in self._awake]
        stays = len(before) == len(phase.groups) and all(of.function == phase.function for _, of in before)
        change_s = 0.0 if stays else max((of.sleep_s for _, of in before), default=0.0) + phase.wake_s
        for group in phase.groups:
            self._awake[group] = run, phase
            self._busy_s[group] += phase.work_s
        self._add(at_s + change_s + phase.work_s, "end", run, phase.groups)

    def _asleep(self, run: int, groups: frozenset[str], at_s: float) -> None:
        """Put a run's function to sleep on these groups, where the next run's turn starts."""
        for group in groups:
            del self._awake[group], self._falling[group]
        self._turns.pass_on(str(run), groups, at_s)
