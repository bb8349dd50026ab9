"""The state of idle replicas until their next use, and the time of their start ahead of it. Pure.

Generation is wanted when the next step begins, the learner when generation has ended, a service by its first complete
group (or when generation has ended, if it shares devices with it). The duration of each of these is estimated from the
run so far; the rest of generation in this step is the last forecast (`StepForecast`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionRole
from rlhfless.scaling.policies.cost_aware.estimators import Recent, StartTimes
from rlhfless.scaling.policies.cost_aware.held import HeldDevices, may_stay
from rlhfless.scaling.policies.fleet_actions import Inputs, leave, note
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policy import Action, Start


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The last forecast of a step's generation."""

    tokens: float = 0.0
    """Tokens of the step, a prompt with each response: expected, and known when generation has ended."""
    generated_s: float = 0.0
    """When its generation is expected to end, or ended."""
    left: int = 0
    """Samples that had not ended at the forecast."""
    replan_s: float = 0.0
    """The latest time of the next forecast."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of an idle replica: it stays awake, sleeps in a tier, or gives its devices back (no tier)."""

    stays: bool
    tier: str | None
    usd: float
    """Keep-alive cost until the end of the gap, including the cost of the wake or start at its end."""
    freed_usd_per_s: float
    """The saving of each second against staying, without the costs of its begin and end."""


def cheapest_idle_state(
    now: PolicyContext, slot: int, starts: StartTimes, gap_s: float, taken_s: float, again_usd: float = 0.0
) -> IdleState:
    """The cheapest idle state of a replica over a gap of g seconds; among equal costs the state that is up sooner. A
    replica whose devices cost d a second, and which is up again after u seconds (by tier), pays

        stay    d g
        sleep   r (g - u) + d u + w x      r: residency of the tier
        leave   d u + w x

    where x is the part of u for which replicas that cost w a second wait: all of u, or, if the replica can be started
    ahead of time, only the part that does not fit into the gap. This is the ski-rental problem (Karlin et al.,
    Algorithmica 3, 1988) with tiers as further options between renting and buying. If sleep has no price of its own, a
    replica that sleeps on a shared device pays only while no other replica is awake there: not for `taken_s` of the
    gap. A replica on devices that another function will need cannot stay, nor start ahead of time. `again_usd` is the
    cost of giving the devices back and taking them again (`held`): of all states but the first.
    """
    replica_slot, shared, waiting = now.layout.replica_slots[slot], now.layout.shared(slot), waiting_usd_per_s(now)
    price = replica_slot.usd_per_s
    states = [] if shared else [IdleState(True, None, price * gap_s, 0.0)]
    for tier in (*sorted(replica_slot.wake_s, key=lambda tier: replica_slot.wake_s[tier]), None):
        up_s = starts.wake_s(replica_slot, tier)
        rate = 0.0 if tier is None else replica_slot.resident_usd_per_s[tier]
        unpaid_s = taken_s if rate >= price else 0.0
        late_s = up_s if shared else max(up_s - gap_s, 0.0)
        asleep_s = max(gap_s - unpaid_s - (up_s - late_s), 0.0)
        usd = rate * asleep_s + price * up_s + waiting * late_s + again_usd
        states.append(IdleState(False, tier, usd, price - rate))
    return min(states, key=lambda state: state.usd)


def release(now: PolicyContext, slot: int, state: IdleState) -> list[Action]:
    """Brings an idle replica to a state."""
    if state.stays:
        return []
    left = leave(now, slot, state.tier)
    choice = f"slot {slot} gives its devices back" if left.tier is None else f"slot {slot} sleeps in {left.tier}"
    inputs: Inputs = {"function": str(now.layout.replica_slots[slot].function), "usd": state.usd}
    return [left, note(now, "release", choice, inputs)]


def waiting_usd_per_s(now: PolicyContext) -> float:
    """The price of a longer step, beside its actors: owned devices that are paid for anyway, other functions' replicas
    that are awake or, as services with devices of their own, soon will be, and the host memory of all that sleep."""
    total = [now.view.fleet.kept_usd_per_s]
    for slot, (replica_slot, slot_view) in enumerate(zip(now.layout.replica_slots, now.view.slots, strict=True)):
        if slot_view.tier is not None:
            asleep = replica_slot.resident_usd_per_s[slot_view.tier]
            total += [asleep] if asleep < replica_slot.usd_per_s else []
        elif slot in now.layout.others and (now.awake(slot) or _serves_alone(now, slot)):
            total.append(replica_slot.usd_per_s)
    return math.fsum(total)


def _serves_alone(now: PolicyContext, slot: int) -> bool:
    learner = now.layout.replica_slots[slot].role is FunctionRole.UPDATES
    return not learner and not now.layout.shared(slot)


class IdleScheduler:
    """State of one run: the durations of gaps so far."""

    def __init__(self, starts: StartTimes, held: HeldDevices) -> None:
        self._starts = starts
        self._held = held
        self._step_s = Recent()
        self._serving: set[int] = set()
        """Services that have not done the step."""
        self._after = Recent()
        """From the end of generation until the next step begins, per token of the step."""
        self._generation_s = Recent()
        self._wanted_s: dict[int, Recent] = {}
        """By slot of a service: from the step's begin until its first complete group. A service that comes up late
        delays the whole step, so it is started for the earliest."""
        self._began_s: dict[int, float] = {}
        self._generated: dict[int, tuple[float, float]] = {}
        """By step: when its generation ended, and its tokens."""
        self._first_group = False

    def after_s(self, tokens: float) -> float:
        """From the end of the generation of a step of so many tokens until the next one begins."""
        return self._after.value * tokens

    def after_at_s(self, confidence: float, tokens: float) -> float:
        """An upper bound of `after_s` with this probability."""
        return max(self._after.at(confidence) * tokens, 0.0)

    def began(self, now: PolicyContext) -> list[Action]:
        """Starts services ahead of their first group."""
        self._began_s[now.view.step] = now.at_s
        self._first_group = False
        slots = now.layout.replica_slots
        self._serving = {slot for slot in now.layout.others if slots[slot].role is not FunctionRole.UPDATES}
        actions: list[Action] = []
        for slot in now.layout.others:
            if slot in self._wanted_s and not now.layout.shared(slot) and now.absent(slot):
                actions.append(self._ahead(now, slot, now.view.slots[slot].tier, self._wanted_s[slot].least))
        return actions

    def look(self, now: PolicyContext, generated_s: float) -> list[Action]:
        """At a beat: notes the first complete group, and starts the learner ahead of the end of generation."""
        if not self._first_group and now.view.finished.any():
            groups = np.bincount(now.view.group)
            if (np.bincount(now.view.group[now.view.finished], minlength=groups.size) == groups).any():
                self._first_group = True
                for slot in now.layout.others:
                    if now.layout.replica_slots[slot].role is not FunctionRole.UPDATES:
                        self._wanted_s.setdefault(slot, Recent()).add(now.at_s - self._began_s[now.view.step])
        actions: list[Action] = []
        for slot in now.layout.others:
            replica_slot = now.layout.replica_slots[slot]
            waking = replica_slot.role is FunctionRole.UPDATES and not now.layout.shared(slot) and now.absent(slot)
            if waking and now.at_s + self._starts.wake_s(replica_slot, now.view.slots[slot].tier) >= generated_s:
                actions.append(Start(slot))
        return actions

    def generated(self, now: PolicyContext, actors: Iterable[int], forecast: StepForecast) -> list[Action]:
        """Generation has ended: all actors are idle, and `actors` are to be up again when the next step begins."""
        self._generated[now.view.step] = now.at_s, forecast.tokens
        self._generation_s.add(now.at_s - self._began_s[now.view.step])
        actions: list[Action] = []
        tiers = {slot: now.view.slots[slot].tier for slot in now.layout.generation}
        for slot in now.layout.generation:
            if now.awake(slot):
                state = self.state(now, slot, forecast)
                actions += release(now, slot, state)
                tiers[slot] = state.tier
                if state.stays:
                    del tiers[slot]
        if self._after.count:
            for slot in actors:
                if slot in tiers and not now.layout.shared(slot):
                    actions.append(self._ahead(now, slot, tiers[slot], self.after_s(forecast.tokens)))
        return actions

    def _ahead(self, now: PolicyContext, slot: int, tier: str | None, gap_s: float) -> Start:
        """Starts a replica from a tier so that it is up at the end of a gap."""
        return Start(slot, now.at_s + gap_s - self._starts.wake_s(now.layout.replica_slots[slot], tier))

    def idle(self, now: PolicyContext, slot: int, forecast: StepForecast) -> list[Action]:
        """A function other than generation has finished its work of the step. After the last service, actors that kept
        their devices make way for the learner."""
        self._serving.discard(slot)
        actions = [] if self._serving else self._make_way(now)
        if not now.awake(slot):
            return actions
        wanted_s = self._generation_s.value
        if now.layout.replica_slots[slot].role is not FunctionRole.UPDATES and not now.layout.shared(slot):
            wanted_s = self._wanted_s[slot].least if slot in self._wanted_s else 0.0
        ended_s, _ = self._generated.get(now.view.step, (now.at_s, 0.0))
        gap_s = max(ended_s + self.after_s(forecast.tokens) - now.at_s, 0.0) + wanted_s
        again_usd = 0.0 if now.layout.shared(slot) else self._again_usd(now, slot, gap_s)
        state = cheapest_idle_state(now, slot, self._starts, gap_s, gap_s, again_usd)
        return [*actions, *release(now, slot, state)]

    def kept(self, now: PolicyContext) -> bool:
        """Whether devices that generation shares are not worth giving back within this step."""
        generation_s = self._generation_s.value if self._generation_s.count else math.inf
        return self._held.kept(now, generation_s, self._step_s.value)

    def _again_usd(self, now: PolicyContext, slot: int, gap_s: float) -> float:
        return 0.0 if now.view.fleet.terms.free else self._held.again_usd(now, slot, gap_s, self._step_s.value)

    def _make_way(self, now: PolicyContext) -> list[Action]:
        if now.view.fleet.terms.free or now.left:
            return []
        actions: list[Action] = []
        for slot in now.layout.generation:
            if now.layout.shared(slot) and now.awake(slot):
                actions += release(now, slot, cheapest_idle_state(now, slot, self._starts, 0.0, 0.0))
        return actions

    def step_ended(self, step: int, end_s: float) -> None:
        """Learns how long the step took from the end of generation."""
        began_s = self._began_s.pop(step, None)
        if began_s is not None:
            self._step_s.add(end_s - began_s)
        if step in self._generated:
            generated_s, tokens = self._generated.pop(step)
            self._after.add((end_s - generated_s) / tokens)

    def state(self, now: PolicyContext, slot: int, forecast: StepForecast) -> IdleState:
        """The state of a generation actor without work until the next step."""
        after_s = self.after_s(forecast.tokens)
        gap_s = max(forecast.generated_s - now.at_s, 0.0) + after_s
        if not self._after.count:
            gap_s = now.layout.replica_slots[slot].start_s  # unknown: the break-even of the ski-rental problem
        if now.view.fleet.terms.free:
            return cheapest_idle_state(now, slot, self._starts, gap_s, after_s)
        if not now.layout.shared(slot):
            return cheapest_idle_state(now, slot, self._starts, gap_s, after_s, self._again_usd(now, slot, gap_s))
        until_s = max(forecast.generated_s - now.at_s, 0.0)
        keep_usd = now.layout.replica_slots[slot].usd_per_s * until_s
        if may_stay(now, slot) and keep_usd <= self._again_usd(now, slot, until_s):
            return IdleState(True, None, keep_usd, 0.0)
        return cheapest_idle_state(now, slot, self._starts, gap_s, after_s)
