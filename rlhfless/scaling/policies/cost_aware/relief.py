"""In mid-step: forecasts the remaining work of each actor, and relieves the actor that ends last where that pays. Pure.

The end of an actor follows from the plan's closed form (`group_times`), for the samples that it has. Each has the
remaining length of a typical draw (`typical_draw`), but the longest is the one by which all have ended with the
confidence that is asked. If that end is too late, or time is worth more than it costs, the half of the last actor's
samples that should end first moves to another actor, which has little left or is started for it.

A look is due when a share of the samples that were left at the last one has ended, or when a share of the time
predicted then has passed; so a step has about a dozen looks, however many samples and heartbeats it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.policies.cost_aware.estimates import StartTimes, StepAim
from rlhfless.scaling.policies.cost_aware.forecasts import EVEN, RemainingLengths
from rlhfless.scaling.policies.cost_aware.group_times import ActorType
from rlhfless.scaling.policies.cost_aware.idle import StepForecast
from rlhfless.scaling.policies.fleet import Inputs, PolicyContext, note, start
from rlhfless.scaling.policy import Action, Ints, Move

LEFT_SHARE = 0.75
"""A look is due when only this share of the samples that were left at the last one is still left."""

PASSED_SHARE = 0.25
"""Or when this share of the time that the last look predicted has passed."""

SURE = 0.99
"""Confidence that a move does not delay the step, if nothing may delay it."""

LEAST_GAIN = 0.1
"""Hysteresis: a move may turn out wrong, so it must save at least this share of the time, and of the cost given up."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the rest of the step is judged by."""

    limit_s: float
    """Seconds from now until all samples should have ended."""
    time_usd_per_s: float
    """The value of a second less of the step."""
    confidence: float
    """Confidence of the estimated ends."""


@dataclass(frozen=True, slots=True)
class HalfMove:
    """Half of an actor's samples go to another one."""

    source: int
    target: int
    rows: Ints
    """Of the unfinished samples."""
    again_s: float
    """Seconds until the target has their KV."""
    left_s: float
    """Seconds until the source has ended the rest."""
    end_s: float
    """Seconds until the target has ended all its samples."""
    gains_s: float
    """Seconds by which both have ended sooner than the source would have."""


class Actors:
    """The generation actors in mid-step, their samples, and when each will have ended its samples."""

    def __init__(
        self,
        now: PolicyContext,
        lengths: RemainingLengths,
        devices: Mapping[int, ActorType],
        starts: StartTimes,
    ) -> None:
        """`devices`: by slot for generation."""
        view, self._devices = now.view, devices
        self.samples, self.means = lengths.samples, lengths.means
        self.home = view.home[lengths.samples]  # [rows]
        self.context = view.tokens[lengths.samples] + view.prompt_tokens[view.group[lengths.samples]]  # [rows]
        self.begun = view.tokens[lengths.samples] > 0  # [rows]
        self._lengths = lengths
        self._draw = lengths.typical_draw(np.lexsort((self.means, self.home)))
        self._grid = lengths.grid()
        self._unended = lengths.unended(self._grid)
        self.until_up_s = {slot: starts.until_serving_s(now, slot) for slot in devices}
        """By slot: seconds until an actor there works; an absent one has to start."""
        self.end_s = dict.fromkeys(devices, 0.0)
        """By slot: seconds until all its samples have ended; 0 without samples."""

    def compute_ends(self, confidence: float) -> None:
        """Computes when each actor ends, such that each actor has ended by its own with this confidence."""
        working = np.unique(self.home).tolist()
        self.end_s = dict.fromkeys(self.end_s, 0.0)
        self.end_s |= {slot: self.end_of(slot, np.flatnonzero(self.home == slot), confidence) for slot in working}

    def end_of(self, slot: int, rows: Ints, confidence: float) -> float:
        """Seconds until an actor would have ended these rows."""
        if not rows.size:
            return 0.0
        draw = self._draw[rows]
        longest = float(draw.max())
        if not self._lengths.known:
            unended = self._unended[self._lengths.kind[rows]].sum(axis=0)
            longest = self._lengths.crossing(self._grid, unended, confidence)
            draw = np.minimum(draw, longest)
        return self.until_up_s[slot] + self._devices[slot].drain_s(draw, self.context[rows], longest)

    def apply(self, move: HalfMove) -> None:
        """Gives the samples of a move to its target, and both actors their new ends."""
        self.home[move.rows] = move.target
        self.until_up_s[move.target] += move.again_s
        self.end_s |= {move.source: move.left_s, move.target: move.end_s}

    def last(self) -> tuple[int, float]:
        """The slot that ends last, and when."""
        slot = max(self.end_s, key=lambda slot: self.end_s[slot])
        return slot, self.end_s[slot]


def is_due(now: PolicyContext, last: StepForecast) -> bool:
    """Whether it is time for a look."""
    return now.left <= LEFT_SHARE * last.left or now.at_s >= last.look_s


def goal_of(now: PolicyContext, aim: StepAim, after_s: float, freed: bool) -> Goal:
    """The goal of the rest of a step, whose work after generation is now expected to take `after_s`. `freed`: whether
    the release of an actor saves anything; where not, or where only time counts, the step is always late."""
    if not freed or math.isinf(aim.time_usd_per_s):
        return Goal(0.0, 0.0, EVEN)
    limit_s = aim.limit_s - (after_s - aim.after_s) - now.at_s
    confidence = aim.margin.confidence if math.isfinite(limit_s) else EVEN
    return Goal(limit_s, aim.time_usd_per_s, confidence)


def relieve(now: PolicyContext, actors: Actors, goal: Goal) -> list[Action]:
    """Moves samples off the actor that ends last, as long as that helps. In a step that is late, a new end is judged
    with the confidence of a move that must not fail."""
    before, notes = actors.home.copy(), list[Action]()
    confidence = goal.confidence ** (1 / max(np.unique(before).size, 1))  # so that all end in time with the goal's
    actors.compute_ends(confidence)
    late = actors.last()[1] > goal.limit_s
    if not late and goal.time_usd_per_s == 0:
        return []
    confidence = SURE if late else confidence
    for _ in actors.end_s:
        move = _next_move(now, actors, goal, confidence, late)
        if move is None:
            break
        actors.apply(move)
        inputs: Inputs = {"gains_s": move.gains_s, "end_s": move.end_s, "confidence": confidence}
        inputs |= {"limit_s": goal.limit_s} if math.isfinite(goal.limit_s) else {}
        text = f"slot {move.source} to {move.target}: {move.rows.size} samples"
        notes.append(note(now, "migrate", text, inputs))
    return [*_moves(now, actors, before), *notes]


def _next_move(now: PolicyContext, actors: Actors, goal: Goal, confidence: float, late: bool) -> HalfMove | None:
    """The best move of half of the last actor's samples, if one helps. With f, the price of a second of an actor, it
    saves

        time_usd_per_s x the seconds by which the last end is earlier - f x the change of the end of both actors
    """
    source, last_s = actors.last()
    rows = np.flatnonzero(actors.home == source)
    half = rows[np.argsort(actors.means[rows], kind="stable")][: rows.size // 2]
    if not half.size:
        return None
    again_s = kv_again_s(now, actors, source, half)
    left_s = actors.end_of(source, np.setdiff1d(rows, half), confidence)
    latest_s = (1 - LEAST_GAIN) * last_s  # a move after which an actor ends later than that gains too little
    others_s = 0.0 if late else max((end_s for slot, end_s in actors.end_s.items() if slot != source), default=0.0)
    if max(left_s, others_s) >= latest_s:
        return None
    price = now.layout.replica_slots
    best: tuple[float, HalfMove] | None = None
    for target, target_s in actors.end_s.items():
        if again_s + target_s >= latest_s:
            continue
        target_rows = np.flatnonzero(actors.home == target)
        if target_rows.size + half.size > now.layout.max_sequences(target):
            continue
        end_s = again_s + actors.end_of(target, np.append(target_rows, half), confidence)
        gained_s = last_s - max(end_s, left_s, others_s)
        cost = price[target].usd_per_s * (end_s - target_s) - price[source].usd_per_s * (last_s - left_s)
        saves = goal.time_usd_per_s * gained_s - cost
        value = -end_s if late else saves
        helps = gained_s > LEAST_GAIN * last_s and (late or saves > LEAST_GAIN * abs(cost))
        if helps and (best is None or (value, target) > (best[0], best[1].target)):
            gains_s = last_s - max(end_s, left_s)
            best = value, HalfMove(source, target, half, again_s, left_s, end_s, gains_s)
    return None if best is None else best[1]


def _moves(now: PolicyContext, actors: Actors, before: Ints) -> list[Action]:
    """Moves samples from their slots `before` to where they are now; a target without an actor is started."""
    moved = np.flatnonzero(before != actors.home)
    actions = start(now, np.unique(actors.home[moved]).tolist())
    for pair in np.unique(before[moved] * now.slots + actors.home[moved]).tolist():
        source, target = divmod(pair, now.slots)
        rows = moved[(before[moved] == source) & (actors.home[moved] == target)]
        actions.append(Move(source, target, actors.samples[rows]))
    return actions


def kv_again_s(now: PolicyContext, actors: Actors, source: int, rows: Ints) -> float:
    """Seconds until the KV of some of a slot's samples is recomputed on another actor, shared prefixes once."""
    rows = rows[actors.begun[rows]]
    engine = now.layout.replica_slots[source].engine
    if not rows.size or engine is None:
        return now.view.fleet.move_s
    view, shared = now.view, 0
    group = view.group[actors.samples[rows]]
    if view.prefixes is not None:
        shared = int(view.prefixes.shared_tokens[group].mean())
    shared_s = _prefixes_s(now, engine.model, group)
    mean = int(actors.context[rows].mean())
    own_s = (engine.model.prefill_s(mean) - engine.model.prefill_s(shared)) * rows.size
    return view.fleet.move_s + own_s + shared_s


def _prefixes_s(now: PolicyContext, model: EngineModel, groups: Ints) -> float:
    """Seconds in which another actor computes the shared prefixes of some prompts."""
    tree = now.view.prefixes
    if tree is None:
        return 0.0
    used, own, total_s = np.unique(tree.levels[:, groups]), tree.own_tokens, 0.0
    for prefix in used[used != NONE].tolist():
        tokens = int(own[prefix])
        total_s += model.prefill_s(tokens, int(tree.tokens[prefix]) - tokens)
    return total_s
