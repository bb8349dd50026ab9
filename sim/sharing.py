"""Runs that share devices in turns of whole phases. Pure; `TurnScheduler` orders the turns, as in live runs.

A phase is a function's work of one step on its devices. A run keeps its turn there until another run waits and its
phase is over; then its function falls asleep, and the other run's wakes. A phase is never interrupted, and takes as
long as if the run were alone: a run slows another one down only by letting it wait.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count

from rlhfless.scaling.turn_scheduler import TurnScheduler


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase: a function's work of one step on its groups."""

    function: str
    groups: frozenset[str]
    """Devices, or groups of them, that it needs together."""
    work_s: float
    before_s: float = 0.0
    """From the end of the run's phase before: work on no device, such as scoring on CPU cores."""
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
    """Simulates runs of equal priority that all begin at once.

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
        """Seats with a phase under way."""
        self._falling: dict[str, int] = {}
        """By group whose function falls asleep: its run."""
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
        """A run has ended a phase: it asks for its next turn, or has ended."""
        if self._next[run] < len(self._runs[run]):
            self._add(at_s + self._runs[run][self._next[run]].before_s, "ask", run)
        else:
            self._ends_s[run] = at_s

    def _go_on(self, at_s: float) -> None:
        """Begins all phases whose turn it is. A run that holds groups, does not work there, and lets another run wait
        for them falls asleep."""
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
        """A run's function has fallen asleep on these groups, and the next run's turn begins there."""
        for group in groups:
            del self._awake[group], self._falling[group]
        self._turns.pass_on(str(run), groups, at_s)
