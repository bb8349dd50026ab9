"""Decide whether idle replicas stay or are released, and when they start again. Pure.

Actors are needed when the next step starts, a service when the first group is complete. These times are estimated from
the run so far; the end of this step's generation comes from the last forecast (`StepForecast`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.policies.cost_aware.estimates import Recent, StartTimes, StepAim
from rlhfless.scaling.policies.fleet import Inputs, PolicyContext, note
from rlhfless.scaling.policy import Action, Release, Start


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The last forecast of a step's generation."""

    tokens: float = 0.0
    """Tokens of the step, a prompt with each response: expected, and exact once generation has ended."""
    generated_s: float = 0.0  # Time at which its generation is expected to end, or ended
    left: int = 0  # Samples unfinished at the forecast
    look_s: float = 0.0  # Latest time of the next forecast


@dataclass(frozen=True, slots=True)
class IdleState:
    """State of an idle replica until its next use: it stays awake, or releases its devices."""

    stays: bool
    usd: float  # Cost until the end of the gap, including a start at its end
    freed_usd_per_s: float  # Saving per second compared with staying, excluding the costs of the release and restart


def cheapest_idle_state(
    now: PolicyContext, slot: int, starts: StartTimes, gap_s: float, aim: StepAim, again_usd: float = 0.0
) -> IdleState:
    """Return the cheaper state of a replica over a gap of g seconds; ties stay.

    A replica whose devices cost d per second, and that after a release waits v seconds for devices and takes another u
    seconds to start, costs

        stay    d g
        leave   d u + w max(v + u - g, 0)

    because it is started ahead of time, and the next step waits for the rest of its start. A second of the step is
    worth w to the contract (`StepAim.delay_usd`). This is the ski-rental problem (Karlin et al., Algorithmica 3, 1988).
    For `again_usd` see `HeldDevices.again_usd`.
    """
    replica_slot = now.layout.replica_slots[slot]
    price, up_s = replica_slot.usd_per_s, replica_slot.start_s
    late_s = starts.start_s(now, slot) - gap_s
    leave_usd = price * up_s + aim.delay_usd(late_s, waiting_usd_per_s(now)) + again_usd
    if price * gap_s <= leave_usd:
        return IdleState(True, price * gap_s, 0.0)
    return IdleState(False, leave_usd, price)


def release(now: PolicyContext, slot: int, state: IdleState) -> list[Action]:
    """Release an idle replica, unless its state is to stay."""
    if state.stays:
        return []
    inputs: Inputs = {"function": str(now.layout.replica_slots[slot].function), "usd": state.usd}
    return [Release(slot), note(now, "release", f"slot {slot} gives its devices back", inputs)]


def waiting_usd_per_s(now: PolicyContext) -> float:
    """Return the price of a second of a step excluding its actors.

    It covers devices that are paid for anyway, and replicas of other functions that are awake or, for services, soon
    will be.
    """
    others = (slot for slot in now.layout.others if now.awake(slot) or not now.is_learner(slot))
    prices = (now.layout.replica_slots[slot].usd_per_s for slot in others)
    return math.fsum([now.view.fleet.kept_usd_per_s, *prices])


class HeldDevices:
    """The leases of a run's devices.

    A released device is paid for until its lease ends (`RentalTerms`). If it is needed again before that, its release
    saves nothing; later, another lease is rounded up, and the device has to be waited for.
    """

    def __init__(self) -> None:
        self._leases: dict[str, tuple[float, float]] = {}
        """By device: start of its lease, and the last time at which it was held."""
        self._holders: Counter[str] = Counter()
        """By device: how many awake replicas hold it now."""

    def note_held(self, now: PolicyContext) -> None:
        """Record the held devices; called at every event."""
        terms = now.view.fleet.terms
        if terms.free:
            return
        self._holders.clear()
        for slot, replica_slot in enumerate(now.layout.replica_slots):
            if now.awake(slot):
                self._holders.update(replica_slot.devices)
                for device in replica_slot.devices:
                    since_s, until_s = self._leases.get(device, (now.at_s, now.at_s))
                    if (
                        now.at_s > terms.paid_until_s(since_s, until_s)
                        and until_s < now.at_s - now.view.fleet.heartbeat_s
                    ):
                        since_s = now.at_s
                    self._leases[device] = since_s, now.at_s

    def again_s(self, now: PolicyContext, slot: int) -> float:
        """Return the seconds that a start at a slot waits for released devices; 0 while they are paid for.

        This includes devices that a release now would give up, and excludes those that other replicas hold.
        """
        terms, own = now.view.fleet.terms, int(now.awake(slot))
        for device in now.layout.replica_slots[slot].devices:
            if device in self._leases and self._holders[device] == own:
                since_s, last_s = self._leases[device]
                if terms.paid_until_s(since_s, now.at_s if own else last_s) <= now.at_s:
                    return terms.reacquire_s
        return 0.0

    def again_usd(self, now: PolicyContext, slot: int, gap_s: float, lease_s: float) -> float:
        """Return the cost of releasing a slot's devices for a gap.

        It covers the paid time within the gap and, if the lease ends before the gap, another lease of about `lease_s`.
        """
        replica_slot, terms = now.layout.replica_slots[slot], now.view.fleet.terms
        ends = [
            terms.paid_until_s(self._leases.get(device, (now.at_s, now.at_s))[0], now.at_s)
            for device in replica_slot.devices
        ]
        paid_s = max(max(ends) - now.at_s, 0.0)
        if gap_s <= paid_s:
            return replica_slot.usd_per_s * gap_s
        return replica_slot.usd_per_s * (paid_s + terms.another_s(lease_s))


class IdleScheduler:
    """Decides about idle replicas of one run, from the durations of gaps so far."""

    def __init__(self, starts: StartTimes, held: HeldDevices) -> None:
        self._starts = starts
        self._held = held
        self._step_s = Recent()
        self._after = Recent()  # From the end of generation until the next step starts, per token of the step
        self._wanted_s: dict[int, Recent] = {}
        """By slot of a service: seconds from the step's start until its first complete group. A late service delays the
        whole step, so it is started for the earliest observed."""
        self.aim = StepAim()
        """The goals of the last planned step, as an estimate of the next one's."""
        self._worked_s: dict[int, float] = {}
        """By slot of an actor: when it was last seen with work, or first seen idle."""
        self._began_s: dict[int, float] = {}
        self._generated_s: dict[int, float] = {}  # By step: end of its generation
        self._last: tuple[float, float, float] | None = None
        """(end, tokens, seconds of the learner's first start) of the last generation not followed by a step."""
        self._first_group = False

    def after_s(self, tokens: float) -> float:
        """Return the seconds from the end of generation of a step with `tokens` tokens until the next step."""
        return self._after.value * tokens

    def _soonest_s(self, tokens: float) -> float:
        """Return the earliest `after_s`: a late actor delays its step."""
        return (self._after.least if self._after.count > 1 else self._after.value) * tokens

    def after_at_s(self, confidence: float, tokens: float) -> float:
        """Return the upper bound of `after_s` with this probability."""
        return max(self._after.at(confidence) * tokens, 0.0)

    def between_usd(self, now: PolicyContext, slot: int, tokens: float) -> float:
        """Return the cost of an actor between two steps of `tokens` tokens; 0 while that time is unknown."""
        return self._over(now, slot, self.after_s(tokens)).usd

    def begin_step(self, now: PolicyContext) -> list[Action]:
        """Start services ahead of their first complete group, and record how long actors were idle."""
        self._began_s[now.view.step] = now.at_s
        self._note_gap(now.at_s)
        self._first_group = False
        actions: list[Action] = []
        for slot in now.layout.others:
            if slot in self._wanted_s and now.absent(slot):
                actions.append(self._ahead(now, slot, self._wanted_s[slot].least))
        return actions

    def _note_gap(self, at_s: float) -> None:
        """Record how long no actor was needed after the last generation."""
        if self._last is not None:
            generated_s, tokens, start_s = self._last
            self._after.add(max(at_s - generated_s - start_s, 0.0) / tokens)
            self._last = None

    def note_work(self, now: PolicyContext, actors: Iterable[int]) -> None:
        """Record that actors have work now."""
        self._worked_s |= dict.fromkeys(actors, now.at_s)

    def note_first_group(self, now: PolicyContext) -> None:
        """Record, at the next heartbeat, when the first group was complete."""
        if not self._first_group and now.view.finished.any():
            groups = np.bincount(now.view.group)
            if (np.bincount(now.view.group[now.view.finished], minlength=groups.size) == groups).any():
                self._first_group = True
                for slot in now.layout.others:
                    if not now.is_learner(slot):
                        self._wanted_s.setdefault(slot, Recent()).add(now.at_s - self._began_s[now.view.step])

    def end_generation(self, now: PolicyContext, actors: Sequence[int], forecast: StepForecast) -> list[Action]:
        """Release idle actors if that pays, and schedule starts of `actors` for the start of the next step."""
        learners = (slot for slot in now.layout.others if now.is_learner(slot) and not now.awake(slot))
        start_s = max((self._starts.start_s(now, slot) for slot in learners), default=0.0)
        self._generated_s[now.view.step] = now.at_s
        self._last = now.at_s, forecast.tokens, start_s
        self.note_work(now, actors)
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

    def start_for(self, now: PolicyContext, slots: Iterable[int], answer_s: float) -> list[Action]:
        """Start the absent ones of these actors so that they serve when the environment answers a parked sample."""
        gap_s = answer_s - now.view.fleet.load_s
        return [self._ahead(now, slot, gap_s) for slot in slots if now.absent(slot)]

    def _ahead(self, now: PolicyContext, slot: int, gap_s: float) -> Start:
        """Start a replica so that it is ready at the end of a gap."""
        return Start(slot, now.at_s + gap_s - self._starts.start_s(now, slot))

    def end_work(self, now: PolicyContext, slot: int, forecast: StepForecast) -> list[Action]:
        """Handle the end of a non-generation function's work for the step.

        The learner is never released: it keeps the run's state.
        """
        if not now.awake(slot) or now.is_learner(slot):
            return []
        wanted_s = self._wanted_s[slot].least if slot in self._wanted_s else 0.0
        ended_s = self._generated_s.get(now.view.step, now.at_s)
        gap_s = max(ended_s + self.after_s(forecast.tokens) - now.at_s, 0.0) + wanted_s
        return release(now, slot, self._over(now, slot, gap_s))

    def _over(self, now: PolicyContext, slot: int, gap_s: float, idle_s: float = 0.0) -> IdleState:
        """Return the state of a replica that has been idle for `idle_s` and is needed in `gap_s`."""
        free = now.view.fleet.terms.free
        again_usd = 0.0 if free else self._held.again_usd(now, slot, gap_s, self._step_s.value)
        return cheapest_idle_state(now, slot, self._starts, idle_s + gap_s, self.aim, again_usd)

    def end_step(self, step: int, end_s: float) -> None:
        """Record how long the step took, and that actors are needed now.

        The next step's event comes later if all of its actors are still starting. To count that wait as a gap would
        start them as late again.
        """
        if step in self._generated_s:
            self._note_gap(end_s)
        began_s = self._began_s.pop(step, None)
        if began_s is not None:
            self._step_s.add(end_s - began_s)
        self._generated_s.pop(step, None)

    def state_of(self, now: PolicyContext, slot: int, forecast: StepForecast, answer_s: float = math.inf) -> IdleState:
        """Return the state of an idle actor until the next step, or until the environment answers a parked sample, in
        `answer_s`.

        For an actor unused by the step's plan, its idle time so far counts too, so that it is released once its idling
        has cost as much as a start. One with work in this step is expected to have some in the next.
        """
        worked_s = self._worked_s.setdefault(slot, now.at_s)
        used = worked_s >= self._began_s.get(now.view.step, math.inf)
        idle_s = 0.0 if used else now.at_s - worked_s
        gap_s = max(forecast.generated_s - now.at_s, 0.0) + self._soonest_s(forecast.tokens)
        if answer_s < gap_s or (not self._after.count and math.isfinite(answer_s)):
            return self._over(now, slot, answer_s)
        if not self._after.count:  # nothing could start an actor in time for a step whose start is unknown
            return IdleState(True, now.layout.replica_slots[slot].usd_per_s * gap_s, 0.0)
        return self._over(now, slot, gap_s, idle_s)
