"""Rebalance the tail of a step: migrate samples off the actor that ends last, if that pays. Pure.

The end of an actor follows from the closed form (`group_times`) for its samples. Each sample has the remaining length
of a typical draw (`typical_draw`); the longest one instead has the length by which all have ended with the requested
confidence. If that end is too late, or time is worth more than it costs, the half of the last actor's samples that
should end first migrates to another actor, which is nearly done or is started for it.

Forecasts are renewed when a share of the remaining samples has ended, or a share of the predicted time has passed:
about a dozen times per step, independent of the numbers of samples and heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.policies.cost_aware.estimates import StartTimes, StepAim
from rlhfless.scaling.policies.cost_aware.forecasts import EVEN, RemainingLengths
from rlhfless.scaling.policies.cost_aware.group_times import ActorType, NetworkTimes
from rlhfless.scaling.policies.cost_aware.idle import StepForecast
from rlhfless.scaling.policies.fleet import Inputs, PolicyContext, note, start
from rlhfless.scaling.policy import UNASSIGNED, Action, Ints, Move

LEFT_SHARE = 0.75  # Forecasts are renewed when only this share of the last forecast's samples is left

PASSED_SHARE = 0.25  # Or when this share of the time predicted by the last forecast has passed

SURE = 0.99  # Confidence that a migration does not delay the step, if nothing may delay it

LEAST_GAIN = 0.1
"""Hysteresis: a migration may turn out wrong, so it must save at least this share of the time, and of the cost given
up."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Criteria for the rest of the step."""

    limit_s: float  # from now until all samples should have ended
    time_usd_per_s: float  # value of ending the step a second sooner
    confidence: float  # of the estimated ends


@dataclass(frozen=True, slots=True)
class HalfMove:
    """A migration of half of an actor's samples to another actor."""

    source: int
    target: int
    rows: Ints  # of the unfinished samples
    again_s: float  # until the target has their KV
    left_s: float  # until the source has ended the rest
    end_s: float  # until the target has ended all its samples
    gains_s: float  # by which both end sooner than the source would have


class Actors:
    """The generation actors in mid-step, their samples, and the expected end of each actor."""

    def __init__(
        self,
        now: PolicyContext,
        lengths: RemainingLengths,
        devices: Mapping[int, ActorType],
        starts: StartTimes,
        wait_token_s: float = 0.0,
    ) -> None:
        """Initialise from the current view. `devices` is keyed by generation slot. `wait_token_s`: seconds for which a
        sample waits for its environment, per token that it generates."""
        self._wait_token_s = wait_token_s
        view, self._devices = now.view, devices
        self.samples, self.means = lengths.samples, lengths.means
        self.home = view.home[lengths.samples]  # [rows]
        self.context = view.tokens[lengths.samples] + view.prompt_tokens[view.group[lengths.samples]]  # [rows]
        self.begun = view.tokens[lengths.samples] > 0  # [rows]
        self._lengths = lengths
        self._draw = lengths.typical_draw(np.lexsort((self.means, self.home)))
        self._grid = lengths.grid()
        self._unended = None if lengths.known else lengths.unended(self._grid)
        self.until_up_s = {slot: starts.until_serving_s(now, slot) for slot in devices}
        """By slot: seconds until an actor there works, including the start of an absent one."""
        self.end_s = dict.fromkeys(devices, 0.0)  # By slot: seconds until all its samples have ended; 0 without samples

    def compute_ends(self, confidence: float) -> None:
        """Compute each actor's end, such that each ends by then with this confidence."""
        working = np.unique(self.home[self.home != UNASSIGNED]).tolist()
        self.end_s = dict.fromkeys(self.end_s, 0.0)
        self.end_s |= {slot: self.end_of(slot, np.flatnonzero(self.home == slot), confidence) for slot in working}

    def end_of(self, slot: int, rows: Ints, confidence: float) -> float:
        """Return the seconds until an actor would have finished these rows."""
        if not rows.size:
            return 0.0
        draw = self._draw[rows]
        longest = float(draw.max())
        if self._unended is not None:
            unended = self._unended[self._lengths.kind[rows]].sum(axis=0)
            longest = self._lengths.crossing(self._grid, unended, confidence)
            draw = np.minimum(draw, longest)
        device = self._devices[slot]
        work_s = device.drain_s(draw, self.context[rows], longest)
        network = NetworkTimes(device.iteration_times.at_zero_s, self._wait_token_s)
        return self.until_up_s[slot] + float(network.of(np.asarray(work_s), np.asarray(longest)))

    def apply(self, move: HalfMove) -> None:
        """Reassign the samples of a migration."""
        self.home[move.rows] = move.target
        self.until_up_s[move.target] += move.again_s
        self.end_s |= {move.source: move.left_s, move.target: move.end_s}

    def last(self) -> tuple[int, float]:
        """Return the slot that ends last, and its end."""
        slot = max(self.end_s, key=lambda slot: self.end_s[slot])
        return slot, self.end_s[slot]


def is_due(now: PolicyContext, last: StepForecast) -> bool:
    """Return whether forecasts should be renewed."""
    return now.left <= LEFT_SHARE * last.left or now.at_s >= last.look_s


def goal_of(now: PolicyContext, aim: StepAim, after_s: float, freed: bool) -> Goal:
    """Return the goal for the rest of a step whose work after generation is now expected to take `after_s`.

    `freed` is whether releasing an actor saves anything. If it does not, or if only time counts, the step always counts
    as late.
    """
    if not freed or math.isinf(aim.time_usd_per_s):
        return Goal(0.0, 0.0, EVEN)
    limit_s = aim.limit_s - (after_s - aim.after_s) - now.at_s
    confidence = aim.margin.confidence if math.isfinite(limit_s) else EVEN
    return Goal(limit_s, aim.time_usd_per_s, confidence)


def rebalance_tail(now: PolicyContext, actors: Actors, goal: Goal) -> list[Action]:
    """Migrate samples off the actor that ends last, as long as that helps.

    In a late step, ends are evaluated with the confidence of a migration that must not fail.
    """
    before, notes = actors.home.copy(), list[Action]()  # parked samples are at no slot, and stay there
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
    """Return the best migration of half of the last actor's samples, or None if none helps.

    With f, the price of a second of an actor, it saves

        time_usd_per_s x the seconds by which the last end is earlier - f x the change of the end of both actors
    """
    source, last_s = actors.last()
    rows = np.flatnonzero(actors.home == source)
    half = rows[np.argsort(actors.means[rows], kind="stable")][: rows.size // 2]
    if not half.size:
        return None
    again_s = kv_again_s(now, actors, source, half)
    left_s = actors.end_of(source, np.setdiff1d(rows, half), confidence)
    latest_s = (1 - LEAST_GAIN) * last_s  # a migration after which an actor ends later than this gains too little
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
    """Migrate samples from their slots `before` to their current ones, and start absent targets."""
    moved = np.flatnonzero(before != actors.home)
    actions = start(now, np.unique(actors.home[moved]).tolist())
    for pair in np.unique(before[moved] * now.slots + actors.home[moved]).tolist():
        source, target = divmod(pair, now.slots)
        rows = moved[(before[moved] == source) & (actors.home[moved] == target)]
        actions.append(Move(source, target, actors.samples[rows]))
    return actions


def kv_again_s(now: PolicyContext, actors: Actors, source: int, rows: Ints) -> float:
    """Return the seconds to recompute the KV of some of a slot's samples on another actor, shared prefixes once."""
    rows = rows[actors.begun[rows]]
    engine = now.layout.replica_slots[source].engine
    if not rows.size or engine is None:
        return now.view.fleet.move_s
    view, shared, shared_s = now.view, 0, 0.0
    group, tree = view.group[actors.samples[rows]], now.view.prefixes
    if tree is not None:
        shared, used = int(tree.shared_tokens[group].mean()), np.unique(tree.levels[:, group])
        for prefix in used[used != NONE].tolist():
            tokens = int(tree.own_tokens[prefix])
            shared_s += engine.model.prefill_s(tokens, int(tree.tokens[prefix]) - tokens)
    mean = int(actors.context[rows].mean())
    own_s = (engine.model.prefill_s(mean) - engine.model.prefill_s(shared)) * rows.size
    return view.fleet.move_s + own_s + shared_s
