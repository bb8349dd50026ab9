"""Looks at a step again while it runs: forecasts what is left, dissolves actors and relieves the last one. Pure.

A review is due when a share of the samples that were left at the last one has ended, or when much of the time that was
foreseen then has passed without that; so a step has a dozen of them, however many samples and beats it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlhfless.records import ReplicaState
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.crew import Layout, Moment, load
from rlhfless.scaling.policies.forecasters import Ahead, Floats, Forecaster
from rlhfless.scaling.policies.learned import Pace, Starts
from rlhfless.scaling.policies.limits import Limits
from rlhfless.scaling.policies.migration import Aim, Board, Transfer, carry_out, dissolve, each, may_relieve, relieve
from rlhfless.scaling.policies.offers import Offers
from rlhfless.scaling.policies.outlook import Engines, Rows, alive, rows_of
from rlhfless.scaling.policies.resting import Resting
from rlhfless.scaling.policies.transfers import Recompute, moves, note, part_of
from rlhfless.scaling.policy import Action, Flags, Ints

LEFT_SHARE = 0.75
"""A review is due when only this share of the samples that were left at the last one is still left."""

PASSED_SHARE = 0.25
"""Or when so much of the time that the last one foresaw has passed."""

UNTESTED_SHARE = 0.1
"""No actor is dissolved in a run's first step while more than this share of its samples is left: who has ended by then
are the shortest ones, and nothing says yet how good a forecast made of those is."""

SURE = 0.99
"""Confidence that a move does not delay the step, where nothing may."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A plan on places."""

    places: tuple[int, ...]  # [actors]
    ready_s: tuple[float, ...]  # [actors]: from now until each can work
    samples: tuple[Ints, ...]  # [actors]: in the order in which they go to the engine
    home: Ints  # [samples]


class Reviewer:
    """State of one run."""

    def __init__(
        self, forecaster: Forecaster, offers: Offers, resting: Resting, starts: Starts, limits: Limits
    ) -> None:
        self._forecaster = forecaster
        self._offers = offers
        self._resting = resting
        self._starts = starts
        self._limits = limits
        self._pace = Pace(0)
        self.needed: set[int] = set()
        """Places that start for later steps, and keep what they have."""
        self._left = 0
        self._next_s = 0.0
        self._layout: Layout | None = None
        self._engines: Engines | None = None

    def begin(self, now: Moment, ahead: Ahead, dealt: Dealt, confidence: float) -> Board:
        """A step has been planned: the outlook with all samples where the plan has them."""
        ready_s = np.zeros(now.places)
        ready_s[list(dealt.places)] = dealt.ready_s
        count = np.bincount(dealt.home, minlength=now.places)
        board = self._board(now, rows_of(ahead, now.view, dealt.home), ready_s, count)
        board.judge(np.flatnonzero(count), each(confidence, board))
        self._pace.begin()
        self._look_again(now, board, now.view.group.size)
        return board

    def hurry(self) -> None:
        """The next beat is to look at all again."""
        self._next_s = -math.inf

    def due(self, now: Moment) -> bool:
        return now.left <= LEFT_SHARE * self._left or now.at_s >= self._next_s

    def review(self, now: Moment) -> list[Action]:
        """Moves samples where that pays. Actors that are empty then are released by the caller."""
        view = now.view
        ahead = self._forecaster.look(view)
        rows = rows_of(ahead, view, view.home[ahead.samples])
        board = self._board(now, rows, self._ready_s(now), load(view))
        steady = _steady(now)
        self._pace.look(now.at_s, view, ahead.samples, _iteration_s(board, steady))
        self._resting.tokens = now.tokens + float(ahead.means.sum())
        aim, again = self._aim(now, board), Recompute(now, rows)
        notes: list[Action] = []
        while (move := self._dissolve(now, board, aim, again)) is not None:
            carry_out(board, move, float(again.seconds[move.source]), aim.confidence)
            rows.home[rows.home == move.source] = move.target
            notes.append(note(now, move, "dissolve", aim))
        notes += self._relieve(now, board, aim, rows, again)
        self._pace.go_on(_iteration_s(board, steady))
        self._look_again(now, board, rows.home.size)
        return [*moves(now, rows, again), *notes]

    def _look_again(self, now: Moment, board: Board, left: int) -> None:
        """Notes when generation is expected to end, and when the next review is due."""
        seconds = float(board.hold_s.max())
        self._left = left
        self._resting.generated_s = now.at_s + seconds
        self._next_s = now.at_s + max(PASSED_SHARE * seconds, now.view.fleet.beat_s)

    def _board(self, now: Moment, rows: Rows, ready_s: Floats, count: Ints) -> Board:
        """The actors of the step, `ready_s` and `count` [places]."""
        if self._pace.factor.size != now.places:
            self._pace = Pace(now.places)
        if self._engines is None or self._layout is not now.layout:
            self._layout, self._engines = now.layout, self._engines_of(now.layout)
        freed = np.zeros(now.places)
        for places in now.layout.alike:
            freed[places] = self._resting.rest(now, int(places[0])).freed_usd_per_s
        outlook = alive(rows, now.places, self._engines.most)
        return Board(self._engines, self._pace.factor, outlook, ready_s, freed, count)

    def _engines_of(self, layout: Layout) -> Engines:
        """Of the rooms as they are: whoever learns anything new of an engine shows new rooms."""
        devices: list[DeviceOption | None] = [None] * len(layout.rooms)
        for place in layout.generation:
            devices[place] = self._offers.device(layout.rooms[place])
        return Engines(devices)

    def _ready_s(self, now: Moment) -> Floats:
        """[places]: until each actor that is there can work."""
        ready_s = np.zeros(now.places)
        for place in now.layout.generation:
            state = now.view.places[place].state
            if state is not None and state is not ReplicaState.SLEEPING:
                ready_s[place] = self._wait_s(now, place)
        return ready_s

    def _wait_s(self, now: Moment, place: int) -> float:
        """Until an actor at a place can take samples."""
        room, there = now.layout.rooms[place], now.view.places[place]
        if there.state is ReplicaState.SERVING:
            return 0.0
        if there.state is ReplicaState.STARTING:
            return self._starts.left_s(place, room, now.at_s) + now.view.fleet.load_s
        up_s = 0.0 if there.state is ReplicaState.STALE else self._starts.wait_s(room, there.tier)
        return up_s + now.view.fleet.load_s

    def _aim(self, now: Moment, board: Board) -> Aim:
        """What counts now; the board is judged by it."""
        limits, aim = self._limits, self._limits.aim
        # The longer the responses turn out, the longer takes what follows them.
        later_s = self._resting.after_at_s(limits.confidence) - aim.after_s
        limit_s, confidence = aim.limit_s - later_s - now.at_s, limits.even
        if math.isfinite(limit_s):
            # What is not certain any more need not be kept certain; but a deadline is not given up.
            confidence = min(max(board.chance(limit_s), confidence), limits.level)
        board.judge(np.flatnonzero(board.count), each(confidence, board))
        if math.isinf(aim.time_usd_per_s):
            return Aim(board.last_s, 0.0, SURE, SURE)
        return Aim(limit_s, aim.time_usd_per_s, each(confidence, board), each(limits.level, board))

    def _dissolve(self, now: Moment, board: Board, aim: Aim, again: Recompute) -> Transfer | None:
        if not self._limits.tested and now.left > UNTESTED_SHARE * now.view.finished.size:
            return None
        sources = [place for place in now.layout.generation if place not in self.needed]
        able = [place for place in now.layout.generation if now.view.places[place].state is ReplicaState.SERVING]
        return dissolve(board, aim, np.array(sources, np.int64), np.array(able, np.int64), again.seconds)

    def _relieve(self, now: Moment, board: Board, aim: Aim, rows: Rows, again: Recompute) -> list[Action]:
        """Relieves the actor that ends last, as long as that helps."""
        notes: list[Action] = []
        if not may_relieve(board, aim):
            return notes
        means, places, wait_s = rows.ahead.means, np.array(now.layout.generation), np.zeros(now.places)
        for place in now.layout.generation:
            if not board.count[place]:  # of actors that have work, the board knows how long they are waited for
                wait_s[place] = self._wait_s(now, place)
        for _ in now.layout.generation:
            source = int(np.argmax(board.end_s))
            mine = np.flatnonzero(rows.home == source)
            half = mine[np.argsort(means[mine], kind="stable")][: mine.size // 2]
            if not half.size:
                break
            delay_s = float(again.seconds[source]) * half.size / mine.size
            sooner = places[board.end_s[places] < board.end_s[source]]
            move = relieve(board, aim, part_of(rows, half, board), sooner, delay_s + wait_s[sooner])
            if move is None:
                break
            carry_out(board, move, delay_s + float(wait_s[move.target]), aim.confidence)
            wait_s[move.target] = 0.0
            rows.home[half] = move.target
            notes.append(note(now, move, "relieve", aim))
            if not may_relieve(board, aim):
                break
        return notes


def _steady(now: Moment) -> Flags:
    """[places]: whether an engine there does nothing but decode."""
    return np.array([there.state is ReplicaState.SERVING and there.waiting == 0 for there in now.view.places])


def _iteration_s(board: Board, steady: Flags) -> Floats:
    """[places]: what an iteration takes now by the models; 0 where an engine does not decode alone."""
    places = np.flatnonzero(steady & (board.count > 0))
    iteration_s = np.zeros(steady.size)
    iteration_s[places] = board.iteration_s(places)
    return iteration_s
