"""Looks at a step again while it runs: forecasts what is left, and dissolves actors where that pays. Pure.

A review is due when a share of the samples that were left at the last one has ended, or when much of the time that was
foreseen then has passed without that; so a step has a dozen of them, however many samples and beats it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import Decision, ReplicaState
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.crew import Inputs, Layout, load
from rlhfless.scaling.policies.forecasters import Ahead, Floats, Forecaster
from rlhfless.scaling.policies.learned import Coverage, Pace, Starts
from rlhfless.scaling.policies.migration import Aim, Board, Dissolve, carry_out, dissolve
from rlhfless.scaling.policies.offers import Offers
from rlhfless.scaling.policies.outlook import Alive, Engines, alive, alive_at_begin, grid_to
from rlhfless.scaling.policies.resting import Resting
from rlhfless.scaling.policy import Action, Flags, Ints, Move, Note, StepView

LEFT_SHARE = 0.75
"""A review is due when only this share of the samples that were left at the last one is still left."""

PASSED_SHARE = 0.25
"""Or when so much of the time that the last one foresaw has passed."""


SURE = 0.99
"""Confidence that a move does not delay the step, where nothing may."""


@dataclass(slots=True)
class StepAim:
    """What counts in a step."""

    limit_s: float = math.inf
    """When it has to have ended."""
    time_usd_per_s: float = 0.0
    """What a second of it is worth; infinite: nothing may delay its end."""


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
        self, forecaster: Forecaster, offers: Offers, resting: Resting, starts: Starts, confidence: float
    ) -> None:
        self._forecaster = forecaster
        self._offers = offers
        self._resting = resting
        self._starts = starts
        self._confidence = confidence
        self.coverage = Coverage()
        self.aim = StepAim()
        self.pace = Pace(0)
        self._foreseen: tuple[Floats, Floats] | None = None
        """Iterations, and how many samples were expected to be alive after each, when the step began."""
        self._left = 0
        self._next_s = 0.0
        self._beat_s = 0.0

    def _level_each(self, board: Board) -> float:
        """The confidence to ask of each actor, so that all of them end in time with the confidence asked for."""
        level = self.level if math.isfinite(self.aim.limit_s) else 0.5
        return float(level ** (1 / max(int(np.count_nonzero(board.count)), 1)))

    @property
    def level(self) -> float:
        """The confidence to ask of forecasts."""
        return self.coverage.level(self._confidence)

    def begin(self, at_s: float, view: StepView, layout: Layout, ahead: Ahead, dealt: Dealt) -> Board:
        """A step has been planned: the outlook with all samples where the plan has them."""
        grid = grid_to(float(ahead.remaining_tokens.max()))
        state = alive_at_begin(ahead, view, dealt.home, grid)
        ready_s = np.zeros(len(view.places))
        ready_s[list(dealt.places)] = dealt.ready_s
        count = np.bincount(dealt.home, minlength=len(view.places))
        board = self._board(at_s, view, layout, state, ready_s, count)
        self._foreseen = (grid, state.sequences.sum(axis=0)) if ahead.levels.size > 1 else None
        self._left = view.group.size
        self._beat_s = view.fleet.beat_s
        self.pace.begin()
        self.expect(at_s, float(board.hold_s.max()))
        return board

    def learn(self, view: StepView) -> None:
        """Generation has ended: whether its longest response was as likely as forecast. One that was cut off at
        max_tokens could not have been any longer, and says nothing."""
        if self._foreseen is not None and not view.truncated.any():
            grid, sequences = self._foreseen
            self.coverage.add(math.exp(-float(np.interp(view.tokens.max(), grid, sequences))))

    def expect(self, at_s: float, seconds: float) -> None:
        """Generation is foreseen to last so much longer."""
        self._resting.generated_s = at_s + seconds
        self._next_s = at_s + max(PASSED_SHARE * seconds, self._beat_s)

    def hurry(self) -> None:
        """The next beat is to look at all again."""
        self._next_s = -math.inf

    def due(self, at_s: float, left: int) -> bool:
        return left <= LEFT_SHARE * self._left or at_s >= self._next_s

    def _engines(self, view: StepView, layout: Layout) -> Engines:
        """All places as the outlook needs them."""
        if self.pace.factor.size != len(view.places):
            self.pace = Pace(len(view.places))
        devices: list[DeviceOption | None] = [None] * len(view.places)
        for place in layout.generation:
            devices[place] = self._offers.device(layout.rooms[place])
        return Engines(devices, self.pace.factor)

    def review(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """Forecasts what is left and dissolves actors. Those that are empty then are released by the caller."""
        ahead = self._forecaster.look(view)
        context = view.tokens[ahead.samples] + view.prompt_tokens[view.group[ahead.samples]]
        grid = grid_to(float(ahead.remaining_tokens.max()))
        state = alive(ahead, view.home[ahead.samples], context, len(view.places), grid)
        board = self._board(at_s, view, layout, state, self._ready_s(at_s, view, layout), load(view))
        aim = self._aim(at_s, view, layout, board)
        recompute_s, with_kv = self._recompute(view, layout, ahead.samples, context)
        able = np.array([p for p in layout.generation if view.places[p].state is ReplicaState.SERVING], np.int64)
        moves: list[Dissolve] = []
        while able.size and (move := dissolve(board, aim, able, recompute_s)) is not None:
            carry_out(board, move, float(recompute_s[move.source]), aim.confidence)
            moves.append(move)
        self._left = ahead.samples.size
        self.expect(at_s, float(board.hold_s.max()))
        return self._actions(at_s, view, moves, with_kv, aim)

    def _board(self, at_s: float, view: StepView, layout: Layout, state: Alive, ready_s: Floats, count: Ints) -> Board:
        """The actors of the step, judged."""
        freed = np.zeros(count.size)
        rests: dict[tuple[str, bool], float] = {}
        for place in layout.generation:
            room = layout.rooms[place]
            key = room.kind, layout.shared(place)
            if key not in rests:
                rests[key] = self._resting.rest(at_s, view, layout, place).freed_usd_per_s
            freed[place] = rests[key]
        board = Board(self._engines(view, layout), state, ready_s, freed, count)
        board.judge(np.flatnonzero(count), self._level_each(board))
        return board

    def _ready_s(self, at_s: float, view: StepView, layout: Layout) -> Floats:
        """[places]: until each actor of the step can work."""
        ready_s = np.zeros(len(view.places))
        for place in layout.generation:
            if view.places[place].state is not ReplicaState.SERVING:
                ready_s[place] = self._starts.left_s(place, layout.rooms[place], at_s) + view.fleet.load_s
        return ready_s

    def _aim(self, at_s: float, view: StepView, layout: Layout, board: Board) -> Aim:
        waiting = self._resting.waiting_usd_per_s(view, layout)
        if math.isinf(self.aim.time_usd_per_s):
            return Aim(board.last_s, 0.0, SURE)
        return Aim(self.aim.limit_s - at_s, self.aim.time_usd_per_s + waiting, self._level_each(board))

    def _recompute(self, view: StepView, layout: Layout, samples: Ints, context: Ints) -> tuple[Floats, Flags]:
        """[places]: seconds to have the KV of a place's samples elsewhere, and whether it is moved for that."""
        places = len(view.places)
        home, begun = view.home[samples], view.tokens[samples] > 0
        count = np.bincount(home[begun], minlength=places)
        tokens = np.bincount(home[begun], context[begun], minlength=places)
        again_s = np.zeros(places)
        for place in np.flatnonzero(count).tolist():
            engine = layout.rooms[place].engine
            assert engine is not None  # samples are at places for generation
            again_s[place] = engine.model.prefill_s(int(tokens[place] / count[place])) * count[place]
        moved_s = np.full(places, math.inf)
        if math.isfinite(view.fleet.kv_token_s):
            moved_s = tokens / np.maximum(count, 1) * view.fleet.kv_token_s
        return view.fleet.move_s + np.minimum(again_s, moved_s), moved_s < again_s

    @staticmethod
    def _actions(at_s: float, view: StepView, moves: Sequence[Dissolve], with_kv: Flags, aim: Aim) -> list[Action]:
        """The moves on the fleet. Samples that move twice are taken from where they are to where they end up."""
        actions: list[Action] = []
        final = {move.source: move.target for move in moves}
        for move in moves:
            target = move.target
            while target in final:
                target = final[target]
            samples = view.samples_at(move.source)
            kv = bool(with_kv[move.source])
            inputs: Inputs = {
                "samples": samples.size,
                "saves_usd": move.saves_usd,
                "end_s": move.end_s,
                "limit_s": aim.limit_s if math.isfinite(aim.limit_s) else -1.0,
                "with_kv": kv,
            }
            actions.append(Move(move.source, target, samples, kv))
            actions.append(Note(Decision(view.step, at_s, "migrate", f"place {move.source} to {target}", inputs)))
        return actions
