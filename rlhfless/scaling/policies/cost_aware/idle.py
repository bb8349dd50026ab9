"""The state of idle replicas until their next use, and the time of their start ahead of it. Pure.

Generation is wanted when the next step begins, a service by its first complete group. The duration of each of these is
estimated from the run so far; the rest of generation in this step is the last forecast (`StepForecast`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionRole
from rlhfless.scaling.policies.cost_aware.estimates import Recent, StartTimes
from rlhfless.scaling.policies.fleet import Inputs, PolicyContext, note
from rlhfless.scaling.policy import Action, Release, Start


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The last forecast of a step's generation."""

    tokens: float = 0.0
    """Tokens of the step, a prompt with each response: expected, and known when generation has ended."""
    generated_s: float = 0.0
    """When its generation is expected to end, or ended."""
    left: int = 0
    """Samples that had not ended at the forecast."""
    look_s: float = 0.0
    """The latest time of the next forecast."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """What an idle replica does until its next use: it stays awake, or gives its devices back."""

    stays: bool
    usd: float
    """Cost until the end of the gap, including the cost of a start at its end."""
    freed_usd_per_s: float
    """The saving of each second against staying, without the costs of its begin and end."""


def cheapest_idle_state(
    now: PolicyContext, slot: int, starts: StartTimes, gap_s: float, again_usd: float = 0.0
) -> IdleState:
    """The cheaper of two states of a replica over a gap of g seconds; at equal costs it stays. A replica whose devices
    cost d a second, and which is up again after u seconds, pays

        stay    d g
        leave   d u + w x

    where x is the part of u for which replicas that cost w a second wait: as it is started ahead of time, the part that
    does not fit into the gap. This is the ski-rental problem (Karlin et al., Algorithmica 3, 1988). `again_usd` is the
    cost of giving the devices back and taking them again (`HeldDevices`).
    """
    replica_slot = now.layout.replica_slots[slot]
    price, up_s = replica_slot.usd_per_s, starts.start_s(replica_slot)
    leave_usd = price * up_s + waiting_usd_per_s(now) * max(up_s - gap_s, 0.0) + again_usd
    if price * gap_s <= leave_usd:
        return IdleState(True, price * gap_s, 0.0)
    return IdleState(False, leave_usd, price)


def release(now: PolicyContext, slot: int, state: IdleState) -> list[Action]:
    """Releases an idle replica, unless its state is to stay."""
    if state.stays:
        return []
    inputs: Inputs = {"function": str(now.layout.replica_slots[slot].function), "usd": state.usd}
    return [Release(slot), note(now, "release", f"slot {slot} gives its devices back", inputs)]


def waiting_usd_per_s(now: PolicyContext) -> float:
    """The price of a longer step, beside its actors: devices that are paid for anyway, and other functions' replicas
    that are awake or, as services, soon will be."""
    total = [now.view.fleet.kept_usd_per_s]
    for slot in now.layout.others:
        replica_slot = now.layout.replica_slots[slot]
        if now.awake(slot) or replica_slot.role is not FunctionRole.UPDATES:
            total.append(replica_slot.usd_per_s)
    return math.fsum(total)


class HeldDevices:
    """The leases of a run's devices, from what the policy sees at its events.

    A device that is given back stays paid for until its lease is over (`RentalTerms`). If it is needed again before
    that, nothing is saved and nothing lost. If later, the next lease is rounded up as well, and the function that needs
    the device waits for it.
    """

    def __init__(self) -> None:
        self._leases: dict[str, tuple[float, float]] = {}
        """By device: when its lease began, and when it was last seen to be held."""

    def note_held(self, now: PolicyContext) -> None:
        """Notes the devices that are held; called at every event."""
        terms = now.view.fleet.terms
        if terms.free:
            return
        for slot, replica_slot in enumerate(now.layout.replica_slots):
            if now.awake(slot):
                for device in replica_slot.devices:
                    since_s, until_s = self._leases.get(device, (now.at_s, now.at_s))
                    if (
                        now.at_s > terms.paid_until_s(since_s, until_s)
                        and until_s < now.at_s - now.view.fleet.heartbeat_s
                    ):
                        since_s = now.at_s
                    self._leases[device] = since_s, now.at_s

    def again_usd(self, now: PolicyContext, slot: int, gap_s: float, lease_s: float) -> float:
        """Cost of giving a slot's devices back for a gap, beside what is saved: paid time in the gap; and, if the lease
        ends before it does, another lease of about `lease_s` and the wait for it."""
        replica_slot, terms = now.layout.replica_slots[slot], now.view.fleet.terms
        ends = [
            terms.paid_until_s(self._leases.get(device, (now.at_s, now.at_s))[0], now.at_s)
            for device in replica_slot.devices
        ]
        paid_s = max(max(ends) - now.at_s, 0.0)
        if gap_s <= paid_s:
            return replica_slot.usd_per_s * gap_s
        waiting_usd = (replica_slot.usd_per_s + now.view.fleet.kept_usd_per_s) * terms.reacquire_s
        return replica_slot.usd_per_s * (paid_s + terms.another_s(lease_s)) + waiting_usd


class IdleScheduler:
    """State of one run: the durations of gaps so far."""

    def __init__(self, starts: StartTimes, held: HeldDevices) -> None:
        self._starts = starts
        self._held = held
        self._step_s = Recent()
        self._after = Recent()
        """From the end of generation until the next step begins, per token of the step."""
        self._wanted_s: dict[int, Recent] = {}
        """By slot of a service: from the step's begin until its first complete group. A service that comes up late
        delays the whole step, so it is started for the earliest."""
        self._worked_s: dict[int, float] = {}
        """By slot of an actor: when the generation of the last step that was planned with it ended, or when it was
        first seen without work."""
        self._began_s: dict[int, float] = {}
        self._generated_s: dict[int, float] = {}
        """By step: when its generation ended."""
        self._last: tuple[float, float, float] | None = None
        """Of the generation that no step has begun after: its end, its tokens, and how long a learner that was not up
        yet takes to start, which it does once in a run."""
        self._first_group = False

    def after_s(self, tokens: float) -> float:
        """From the end of the generation of a step of so many tokens until the next one begins."""
        return self._after.value * tokens

    def _soonest_s(self, tokens: float) -> float:
        """As `after_s`, at the earliest: an actor that comes up late delays its step. Of one step there is one time."""
        return (self._after.least if self._after.count > 1 else self._after.value) * tokens

    def after_at_s(self, confidence: float, tokens: float) -> float:
        """An upper bound of `after_s` with this probability."""
        return max(self._after.at(confidence) * tokens, 0.0)

    def between_usd(self, now: PolicyContext, slot: int, tokens: float) -> float:
        """Cost of an actor from the end of a step of so many tokens until the next one begins; 0 while that time is
        not known."""
        return self._over(now, slot, self.after_s(tokens)).usd

    def begin_step(self, now: PolicyContext) -> list[Action]:
        """A step begins: services are started ahead of their first complete group. How long actors were idle before it
        is known now; steps that overlap begin before the one before them ends."""
        self._began_s[now.view.step] = now.at_s
        if self._last is not None:
            generated_s, tokens, start_s = self._last
            self._after.add(max(now.at_s - generated_s - start_s, 0.0) / tokens)
            self._last = None
        self._first_group = False
        actions: list[Action] = []
        for slot in now.layout.others:
            if slot in self._wanted_s and now.absent(slot):
                actions.append(self._ahead(now, slot, self._wanted_s[slot].least))
        return actions

    def note_first_group(self, now: PolicyContext) -> None:
        """Notes, at the heartbeat after it, when the first group of siblings was complete."""
        if not self._first_group and now.view.finished.any():
            groups = np.bincount(now.view.group)
            if (np.bincount(now.view.group[now.view.finished], minlength=groups.size) == groups).any():
                self._first_group = True
                for slot in now.layout.others:
                    if now.layout.replica_slots[slot].role is not FunctionRole.UPDATES:
                        self._wanted_s.setdefault(slot, Recent()).add(now.at_s - self._began_s[now.view.step])

    def end_generation(self, now: PolicyContext, actors: Sequence[int], forecast: StepForecast) -> list[Action]:
        """Generation has ended, so all actors are idle, and `actors` are to be up again when the next step begins."""
        replica_slots = now.layout.replica_slots
        learners = [slot for slot in now.layout.others if replica_slots[slot].role is FunctionRole.UPDATES]
        start_s = max((self._starts.start_s(replica_slots[s]) for s in learners if not now.awake(s)), default=0.0)
        self._generated_s[now.view.step] = now.at_s
        self._last = now.at_s, forecast.tokens, start_s
        self._worked_s |= dict.fromkeys(actors, now.at_s)
        actions: list[Action] = []
        absent = {slot for slot in now.layout.generation if not now.awake(slot)}
        for slot in now.layout.generation:
            if now.awake(slot) and not (state := self.state_of(now, slot, forecast)).stays:
                actions += release(now, slot, state)
                absent.add(slot)
        if self._after.count:
            after_s = self._soonest_s(forecast.tokens)
            actions += [self._ahead(now, slot, after_s) for slot in actors if slot in absent]
        return actions

    def _ahead(self, now: PolicyContext, slot: int, gap_s: float) -> Start:
        """Starts a replica so that it is up at the end of a gap."""
        return Start(slot, now.at_s + gap_s - self._starts.start_s(now.layout.replica_slots[slot]))

    def end_work(self, now: PolicyContext, slot: int, forecast: StepForecast) -> list[Action]:
        """A function other than generation has finished its work of the step. The learner keeps the run's state, and
        is never released."""
        if not now.awake(slot) or now.layout.replica_slots[slot].role is FunctionRole.UPDATES:
            return []
        wanted_s = self._wanted_s[slot].least if slot in self._wanted_s else 0.0
        ended_s = self._generated_s.get(now.view.step, now.at_s)
        gap_s = max(ended_s + self.after_s(forecast.tokens) - now.at_s, 0.0) + wanted_s
        return release(now, slot, self._over(now, slot, gap_s))

    def _over(self, now: PolicyContext, slot: int, gap_s: float, idle_s: float = 0.0) -> IdleState:
        """The state of a replica until its next use in `gap_s`, which has been idle for `idle_s`."""
        free = now.view.fleet.terms.free
        again_usd = 0.0 if free else self._held.again_usd(now, slot, gap_s, self._step_s.value)
        return cheapest_idle_state(now, slot, self._starts, idle_s + gap_s, again_usd)

    def end_step(self, step: int, end_s: float) -> None:
        """Learns how long the step took."""
        began_s = self._began_s.pop(step, None)
        if began_s is not None:
            self._step_s.add(end_s - began_s)
        self._generated_s.pop(step, None)

    def state_of(self, now: PolicyContext, slot: int, forecast: StepForecast) -> IdleState:
        """The state of a generation actor without work until the next step. How long it has been idle counts as well:
        an actor that the plans leave out for some steps is not awaited at the next one."""
        idle_s = now.at_s - self._worked_s.setdefault(slot, now.at_s)
        gap_s = max(forecast.generated_s - now.at_s, 0.0) + self._soonest_s(forecast.tokens)
        if not self._after.count:  # nothing could start an actor in time for a step whose begin is not known
            return IdleState(True, now.layout.replica_slots[slot].usd_per_s * gap_s, 0.0)
        return self._over(now, slot, gap_s, idle_s)
