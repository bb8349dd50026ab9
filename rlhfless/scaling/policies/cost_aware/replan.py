"""Replans a step while it runs: forecasts the remaining work, and relieves the last actor. Pure.

A replan is due when a share of the samples that were left at the last one has ended, or when a share of the time
predicted then has passed; so a step has about a dozen replans, however many samples and beats it has.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from rlhfless.prefixes.trie import NONE
from rlhfless.records import ReplicaState
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.cost_aware.completion import EngineTable, Unfinished, alive, unfinished_of
from rlhfless.scaling.policies.cost_aware.deadline import StepAim
from rlhfless.scaling.policies.cost_aware.estimators import Pace, StartTimes
from rlhfless.scaling.policies.cost_aware.forecasters import Floats, RemainingLengths
from rlhfless.scaling.policies.cost_aware.idle import IdleScheduler, StepForecast
from rlhfless.scaling.policies.cost_aware.migration import (
    Aim,
    MigrationState,
    Transfer,
    may_relieve,
    part_of,
    relieve,
)
from rlhfless.scaling.policies.cost_aware.planner import StepPlan
from rlhfless.scaling.policies.fleet_actions import Inputs, note, start
from rlhfless.scaling.policies.fleet_layout import Layout, PolicyContext
from rlhfless.scaling.policies.fleet_options import FleetOptionsCache
from rlhfless.scaling.policy import Action, Ints, Move

LEFT_SHARE = 0.75
"""A replan is due when only this share of the samples that were left at the last one is still left."""

PASSED_SHARE = 0.25
"""Or when this share of the time that the last replan predicted has passed."""

SURE = 0.99
"""Confidence that a move does not delay the step, if nothing may delay it."""


@dataclass(frozen=True, slots=True)
class Replan:
    """The result of a replan."""

    actions: list[Action]
    loads: Ints
    """[slots]: samples, once the actions are carried out."""
    forecast: StepForecast


def is_due(now: PolicyContext, last: StepForecast) -> bool:
    """Whether it is time to replan."""
    return now.left <= LEFT_SHARE * last.left or now.at_s >= last.replan_s


class Replanner:
    """State of one run: its engines, and their pace."""

    def __init__(self, fleet_options: FleetOptionsCache, idle: IdleScheduler, starts: StartTimes) -> None:
        self._fleet_options = fleet_options
        self._idle = idle
        self._starts = starts
        self._pace = Pace(0)
        self._layout: Layout | None = None
        self._engines: EngineTable | None = None

    def begin(
        self, now: PolicyContext, lengths: RemainingLengths, made: StepPlan, before: StepForecast
    ) -> tuple[MigrationState, StepForecast]:
        """A step has been planned: returns the completion model with the samples at their planned slots, and its
        forecast. `before` is the forecast before the plan."""
        ready_s, assignment = np.zeros(now.slots), made.assignment
        ready_s[list(assignment.slots)] = assignment.ready_s
        count = np.bincount(assignment.home, minlength=now.slots)
        rows = unfinished_of(lengths, now.view, assignment.home)
        state = self._state(now, rows, ready_s, count, before)
        state.judge(np.flatnonzero(count), state.each(made.confidence))
        self._pace.begin()
        return state, _forecast(now, state, before.tokens)

    def replan(self, now: PolicyContext, lengths: RemainingLengths, aim: StepAim, last: StepForecast) -> Replan:
        """Moves samples where that pays."""
        rows = unfinished_of(lengths, now.view, now.view.home[lengths.samples])
        state = self._state(now, rows, self._ready_s(now), now.loads, last)
        self._pace.look(now.at_s, now.view, lengths.samples, _iteration_s(now, state))
        tokens = now.tokens + float(lengths.means.sum())
        target, transfer = self._aim(now, state, aim, tokens), Transfers(now, rows)
        notes = self._relieve(now, state, _surely(target, state), rows, transfer)
        self._pace.go_on(_iteration_s(now, state))
        return Replan([*transfer.moves(now, rows), *notes], state.count, _forecast(now, state, tokens))

    def _state(
        self, now: PolicyContext, rows: Unfinished, ready_s: Floats, count: Ints, last: StepForecast
    ) -> MigrationState:
        """The actors of the step, `ready_s` and `count` [slots]."""
        if self._pace.factor.size != now.slots:
            self._pace = Pace(now.slots)
        if self._engines is None or self._layout is not now.layout:
            # Cached by layout: when a fleet has new figures of an engine, its view has new slots.
            devices: list[DeviceOption | None] = [None] * now.slots
            for slot in now.layout.generation:
                devices[slot] = self._fleet_options.device(now.layout.replica_slots[slot])
            self._layout, self._engines = now.layout, EngineTable(devices)
        freed = np.zeros(now.slots)
        for slots in now.layout.alike:
            freed[slots] = self._idle.state(now, int(slots[0]), last).freed_usd_per_s
        expected = alive(rows, now.slots, self._engines.most)
        return MigrationState(self._engines, self._pace.factor, expected, ready_s, freed, count)

    def _ready_s(self, now: PolicyContext) -> Floats:
        """[slots]: seconds until each existing actor can work."""
        ready_s = np.zeros(now.slots)
        for slot in now.layout.generation:
            if not now.absent(slot):
                ready_s[slot] = self._starts.until_serving_s(now, slot)
        return ready_s

    def _aim(self, now: PolicyContext, state: MigrationState, aim: StepAim, tokens: float) -> Aim:
        """The goals now; the state is judged by them."""
        margin = aim.margin
        # The longer the responses are, the longer the work after generation takes.
        later_s = self._idle.after_at_s(margin.confidence, tokens) - aim.after_s
        limit_s, confidence = aim.limit_s - later_s - now.at_s, margin.even
        if math.isfinite(limit_s):
            # A deadline that is no longer certain need not stay certain, but it is not given up.
            confidence = min(max(state.chance(limit_s), confidence), margin.level)
        state.judge(np.flatnonzero(state.count), state.each(confidence))
        # Where only time counts, or no actor's release would save anything, the step is always late.
        if math.isinf(aim.time_usd_per_s) or not state.freed_usd_per_s.any():
            return Aim(0.0, 0.0, SURE)
        return Aim(limit_s, aim.time_usd_per_s, state.each(confidence))

    def _relieve(
        self, now: PolicyContext, state: MigrationState, aim: Aim, rows: Unfinished, transfer: Transfers
    ) -> list[Action]:
        """Relieves the actor that ends last, as long as that helps."""
        notes: list[Action] = []
        if not may_relieve(state, aim):
            return notes
        means, slots, wait_s = rows.lengths.means, np.array(now.layout.generation), np.zeros(now.slots)
        for slot in now.layout.generation:
            if not state.count[slot]:  # for actors with work, `ready_s` of the state has the wait
                wait_s[slot] = self._starts.until_serving_s(now, slot)
        for _ in now.layout.generation:
            source = int(np.argmax(state.end_s))
            on_source = np.flatnonzero(rows.home == source)
            half = on_source[np.argsort(means[on_source], kind="stable")][: on_source.size // 2]
            if not half.size:
                break
            delay_s = float(transfer.seconds[source]) * half.size / on_source.size
            sooner = slots[state.end_s[slots] < state.end_s[source]]
            move = relieve(state, aim, part_of(rows, half, state), sooner, delay_s + wait_s[sooner])
            if move is None:
                break
            state.carry_out(move, delay_s + float(wait_s[move.target]), aim.confidence)
            wait_s[move.target] = 0.0
            rows.home[half] = move.target
            notes.append(_note(now, move, "relieve", aim))
            if not may_relieve(state, aim):
                break
        return notes


def _surely(aim: Aim, state: MigrationState) -> Aim:
    """The goals of a relief: in a step that is late, the actor's new end is judged with the confidence of a move that
    must not fail, so that only reliefs that surely gain time are paid for."""
    return aim if state.last_s <= aim.limit_s else dataclasses.replace(aim, confidence=SURE)


class Transfers:
    """The time to compute the KV of a slot's samples again at another actor. A prefix that the samples share is
    computed, or got from another actor, once for all of them."""

    def __init__(self, now: PolicyContext, rows: Unfinished) -> None:
        home, context = rows.home[rows.begun], rows.context[rows.begun]
        count = np.bincount(home, minlength=now.slots)
        mean = np.bincount(home, context, minlength=now.slots) / np.maximum(count, 1)
        group, shared = now.view.group[rows.lengths.samples[rows.begun]], np.zeros(now.slots)
        if now.view.prefixes is not None:
            total = np.bincount(home, now.view.prefixes.shared_tokens[group], minlength=now.slots)
            shared = total / np.maximum(count, 1)
        again_s = np.zeros(now.slots)
        for slot in np.flatnonzero(count).tolist():
            model, before = _model(now, slot), int(shared[slot])
            again_s[slot] = (model.prefill_s(int(mean[slot])) - model.prefill_s(before)) * count[slot]
            again_s[slot] += _prefixes_s(now, model, group[home == slot])
        self.seconds: Floats = now.view.fleet.move_s + again_s
        """[slots]: seconds to compute the KV of all samples of a slot one after the other."""

    def moves(self, now: PolicyContext, rows: Unfinished) -> list[Action]:
        """Moves samples from their slots to the slots in `rows`; a target without an actor is started."""
        before = now.view.home[rows.lengths.samples]
        moved = np.flatnonzero(before != rows.home)
        sources, targets = before[moved], rows.home[moved]
        absent = [slot for slot in np.unique(targets).tolist() if now.absent(slot)]
        actions = start(now, absent)
        pair = sources * now.slots + targets
        for source, target in (divmod(code, now.slots) for code in np.unique(pair).tolist()):
            samples = rows.lengths.samples[moved[pair == source * now.slots + target]]
            actions.append(Move(source, target, samples))
        return actions


def _model(now: PolicyContext, slot: int) -> EngineModel:
    engine = now.layout.replica_slots[slot].engine
    assert engine is not None  # samples are at slots for generation
    return engine.model


def _prefixes_s(now: PolicyContext, model: EngineModel, groups: Ints) -> float:
    """Seconds until another actor has the prefixes of some prompts, computed or moved, whichever is sooner."""
    tree = now.view.prefixes
    if tree is None:
        return 0.0
    used, own, total_s = np.unique(tree.levels[:, groups]), tree.own_tokens, 0.0
    for prefix in used[used != NONE].tolist():
        tokens = int(own[prefix])
        computed_s = model.prefill_s(tokens, int(tree.tokens[prefix]) - tokens)
        total_s += min(computed_s, tokens * now.view.fleet.prefix_token_s)
    return total_s


def _forecast(now: PolicyContext, state: MigrationState, tokens: float) -> StepForecast:
    """The expected end of generation, and the time of the next replan."""
    seconds = float(state.hold_s.max())
    next_s = now.at_s + max(PASSED_SHARE * seconds, now.view.fleet.beat_s)
    return StepForecast(tokens, now.at_s + seconds, int(state.count.sum()), next_s)


def _note(now: PolicyContext, move: Transfer, why: str, aim: Aim) -> Action:
    """The decision with its inputs, for the ledger."""
    inputs: Inputs = {"why": why, "saves_usd": move.saves_usd, "end_s": move.end_s, "confidence": aim.confidence}
    if math.isfinite(aim.limit_s):
        inputs["limit_s"] = aim.limit_s
    return note(now, "migrate", f"slot {move.source} to {move.target}", inputs)


def _iteration_s(now: PolicyContext, state: MigrationState) -> Floats:
    """[slots]: seconds of an iteration now by the models; 0 if an engine does other work than decoding."""
    decodes = [slot_view.state is ReplicaState.SERVING and slot_view.waiting == 0 for slot_view in now.view.slots]
    slots = np.flatnonzero(np.array(decodes) & (state.count > 0))
    iteration_s = np.zeros(now.slots)
    iteration_s[slots] = state.iteration_s(slots)
    return iteration_s
