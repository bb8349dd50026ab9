"""Migration by value: actors are relieved if that saves more than it costs. Pure.

    relieve    from the actor that ends last, the half of its samples that should end first moves to another actor,
               which has little left or is started for it. This is done while the actor would end too late, or if the
               saved time is worth more than its cost.

It is judged by the completion model: rows of expected sequences and contexts, which add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scaling.policies.cost_aware import kernel
from rlhfless.scaling.policies.cost_aware.completion import FEW, Alive, EngineTable, Unfinished, alive
from rlhfless.scaling.policies.cost_aware.forecasters import Floats
from rlhfless.scaling.policies.cost_aware.kernel import ExpectedWork
from rlhfless.scaling.policy import Ints

LEAST_GAIN = 0.1
"""Hysteresis: a move may turn out wrong, so it must save at least this share of the given-up cost."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The goals from now on."""

    limit_s: float
    """Seconds from now until all samples should have ended."""
    time_usd_per_s: float
    """The value of shortening the step by a second."""
    confidence: float
    """Confidence of the estimated end of an actor."""


@dataclass(frozen=True, slots=True)
class MovedPart:
    """Some samples of an actor, as the completion model counts them."""

    columns: Floats  # [3, 1, T]: as they count at the target, each admitted at once
    freed: Floats
    """[3, 1, T]: the work that the source loses. It differs from `columns` if samples wait: others are admitted
    sooner."""
    count: int


class MigrationState:
    """The actors of a step and their remaining work. Columns [3, slots, T] change as samples are moved in it."""

    def __init__(
        self, engines: EngineTable, pace: Floats, expected: Alive, ready_s: Floats, freed_usd_per_s: Floats, count: Ints
    ) -> None:
        """It takes over the columns of `expected`. `pace`: measured time of an engine by its model's; `ready_s`:
        seconds until an actor can work; `freed_usd_per_s`: saving of each second less of it; `count`: its samples. All
        [slots]."""
        self.engines = engines
        self.grid = expected.grid
        self.columns = expected.columns
        self.ready_s = ready_s.copy()
        self.freed_usd_per_s = freed_usd_per_s
        self.count = count.copy()
        self.hold_s = np.zeros(ready_s.size)
        """[slots]: expected seconds until an actor has no work left."""
        self.end_s = np.zeros(ready_s.size)
        """[slots]: the same with the confidence of the aim."""
        self.work = ExpectedWork(engines.speeds, pace, expected.grid, self.columns)
        self._nothing = np.zeros((3, 1, expected.grid.size))

    @property
    def last_s(self) -> float:
        """Seconds until all actors have ended."""
        return float(self.end_s.max())

    def each(self, confidence: float) -> float:
        """The confidence to ask of each of n actors, so that all of them end in time with `confidence`: its n-th
        root."""
        return float(confidence ** (1 / max(int(np.count_nonzero(self.count)), 1)))

    def judge(self, slots: Ints, confidence: float) -> None:
        """Updates `hold_s` and `end_s` of slots."""
        self.hold_s[slots], self.end_s[slots] = self.trial(slots, self._nothing, 0.0, confidence)

    def trial(self, slots: Ints, more: Floats, delay_s: float | Floats, *confidences: float) -> Floats:
        """`hold_s`, and `end_s` with each confidence, [1 + confidences, rows], of actors with `more` (or less) work
        [3, 1, T], after a delay."""
        out = np.empty((slots.size, 1 + len(confidences)))
        kernel.trial(self.work, slots, more, -np.log(confidences), out)
        return np.asarray(out.T + (self.ready_s[slots] + delay_s))

    def chance(self, limit_s: float) -> float:
        """The probability that all actors have ended within `limit_s`."""
        slots = np.flatnonzero(self.count)
        within_s, unended = limit_s - self.ready_s[slots], np.empty(slots.size)
        kernel.unended_within(self.work, slots, within_s, unended)
        return float(np.exp(-unended.sum())) if (within_s >= 0).all() else 0.0

    def iteration_s(self, slots: Ints) -> Floats:
        """[rows]: seconds of an iteration now at `slots` [rows], by the models."""
        out = np.empty(slots.size)
        kernel.iterations_s(self.work, slots, out)
        return out

    def carry_out(self, move: Transfer, recompute_s: float, confidence: float) -> None:
        """Moves samples, and judges both actors anew."""
        source, target = move.source, move.target
        self.take(source, target, move.part)
        self.ready_s[target] += recompute_s
        self.judge(np.array([source, target]), confidence)

    def take(self, source: int, target: int, part: MovedPart) -> None:
        """Moves a part of an actor's samples to another actor, without judging either."""
        self.columns[:, target] += part.columns[:, 0]
        self.columns[:, source] = np.maximum(self.columns[:, source] - part.freed[:, 0], 0.0)
        self.count[target] += part.count
        self.count[source] -= part.count


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move of samples from one actor to another."""

    source: int
    target: int
    saves_usd: float
    """The saving, with time counted as money."""
    end_s: float
    """The later end of the two actors after the move."""
    part: MovedPart


def part_of(rows: Unfinished, chosen: Ints, state: MigrationState) -> MovedPart:
    """Some of an actor's rows as the completion model counts them, on the state's grid; at the target none of them
    waits."""
    home = rows.home[chosen[:1]]
    few, most = state.count[home] <= FEW, state.engines.most[home]  # as they were counted in the state

    def counted(some: Ints, limits: Ints) -> Floats:
        here = replace(rows.of(some), home=np.zeros(some.size, np.int64))
        return alive(here, 1, limits, few, state.grid).columns

    columns = counted(np.sort(chosen), np.array([chosen.size]))
    if (state.count[home] <= most).all():
        return MovedPart(columns, columns, chosen.size)
    left = np.setdiff1d(np.flatnonzero(rows.home == home), chosen)
    return MovedPart(columns, state.columns[:, home] - counted(left, most), chosen.size)


def may_relieve(state: MigrationState, aim: Aim) -> bool:
    """Whether moving samples away from the actor that ends last can help at all. If all end in time, it can only save
    time, and at most the time between the last two ends."""
    if state.last_s > aim.limit_s:
        return True
    before_s = float(np.partition(state.end_s, -2)[-2]) if state.end_s.size > 1 else 0.0
    return aim.time_usd_per_s > 0 and state.last_s - before_s > LEAST_GAIN * state.last_s


def relieve(state: MigrationState, aim: Aim, part: MovedPart, targets: Ints, wait_s: Floats) -> Transfer | None:
    """The best target for `part` of the actor that ends last, or None if no move helps. The state is not changed.
    With f, the saving of a second less of an actor, and h, the seconds until it has no work left, a move saves

        time_usd_per_s x the seconds by which the last end is earlier - f x the change of h of both actors

    `wait_s` [targets]: seconds until the samples can continue there, in addition to `ready_s`.
    """
    source = int(np.argmax(state.end_s))
    targets, wait_s = targets[targets != source], wait_s[targets != source]
    if not targets.size:
        return None
    one = np.array([source])
    left_hold_s, left_end = state.trial(one, -part.freed, 0.0, aim.confidence)
    hold_s, end = state.trial(targets, part.columns, wait_s, aim.confidence)
    ends = np.maximum(end, left_end)
    costs = state.freed_usd_per_s[targets] * (hold_s - state.hold_s[targets])
    costs += state.freed_usd_per_s[source] * (left_hold_s - state.hold_s[source])
    late = state.last_s > aim.limit_s
    # If the step is late, every late actor counts, though relieving one of several does not yet end the step earlier.
    others = 0.0 if late else _last_without(state, one, targets)
    gained_s = state.last_s - np.maximum(ends, others)
    saves = aim.time_usd_per_s * gained_s - costs
    fits = state.count[targets] + part.count <= state.engines.most[targets]
    allowed = fits & (gained_s > LEAST_GAIN * state.last_s) & (late | (saves > LEAST_GAIN * np.abs(costs)))
    if not allowed.any():
        return None
    # Targets that end in time come first, by saving; otherwise the earliest end.
    short_s = np.maximum(ends - aim.limit_s, 0.0) if late else np.zeros(ends.size)
    at = int(np.lexsort((-saves, short_s, ~allowed))[0])
    return Transfer(source, int(targets[at]), float(saves[at]), float(ends[at]), part)


def _last_without(state: MigrationState, source: Ints, target: Ints) -> Floats:
    """[pairs]: seconds until all actors but a source and its target have ended."""
    last = np.zeros(target.size)
    for slot in np.argsort(state.end_s)[-3:]:  # one of the last three is neither
        last = np.where((slot != source) & (slot != target), state.end_s[slot], last)
    return last
