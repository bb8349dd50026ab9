"""A learner whose number of devices, or their kind, changes between two steps, as in a live run
(rlhfless.loop.learner_size): the live choice (rlhfless.scaling.learner_ranks), by the times of the step that has ended.

A change ends the group, and starts one on other devices. The first step is not measured, because it has the starts.
Devices that a group leaves are given back. Those of all sizes are set aside for the learner, so all are always free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from rlhfless.records import Decision, FunctionName
from rlhfless.scaling.learner_ranks import (
    CHANGED_IN_S,
    LEARNER_RANKS,
    GroupSize,
    RankSpeeds,
    SizeChoice,
    StepMeasured,
    choose_size,
    learned_tokens,
    learning,
    released_usd_per_s,
    saved_usd_per_s,
)
from rlhfless.scaling.plan import RunContract, contract_for_step
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.ledger import SimulatedLedger
from rlhfless.sim.setup import LearnerShape, Setup


@dataclass(frozen=True, slots=True)
class LearnerSizes:
    """The sizes that a simulated learner may have."""

    shapes: Mapping[GroupSize, LearnerShape]
    """It begins with the first."""
    change_s: Callable[[GroupSize, GroupSize], float]
    """Seconds from the end of a group of one size until a group of another has its state; of a size and itself, what is
    expected before any change was made."""
    rates: Mapping[str, float]
    """By kind of device, by data sheets (`rank_rates`)."""

    def changed(self, before: GroupSize, choice: SizeChoice, ledger: SimulatedLedger, now_s: float) -> LearnerShape:
        """The shape after a change at the end of the last step, which the ledger notes."""
        change_s = self.change_s(before, choice.size)
        inputs: dict[str, float | int | str | bool] = {"before": str(before), "reason": choice.reason, **choice.figures}
        inputs[CHANGED_IN_S] = change_s
        ledger.decisions.append(Decision(ledger.steps[-1].step, now_s, LEARNER_RANKS, str(choice.size), inputs))
        shape = self.shapes[choice.size]
        return replace(shape, slot_setup=replace(shape.slot_setup, start_s=change_s))


class ChoosesSize(Protocol):
    """Decides the size of a simulated learner."""

    def choose(self, fleet: SimulatedFleet, ledger: SimulatedLedger, now_s: float) -> LearnerShape | None:
        """The learner's shape from now on; None while it stays. Called at the end of each step."""


class SimulatedLearnerSize:
    """The size of a simulated learner by the live choice: a ChoosesSize."""

    def __init__(self, sizes: LearnerSizes, setup: Setup, terms: RunContract, prices: PriceBook) -> None:
        self._sizes = sizes
        self._terms = terms
        self._prices = prices
        self._size = next(iter(sizes.shapes))
        self._speeds = RankSpeeds(sizes.rates)
        self._change_s = sizes.change_s(self._size, self._size)
        """How long the last change took."""
        own = {size: shape.slot_setup.allocation for size, shape in sizes.shapes.items()}
        others = (slot_setup.allocation for slot_setup in setup.slot_setups)
        every = (device for allocation in chain(others, own.values()) for device in allocation.devices)
        self._released_usd_per_s = released_usd_per_s(prices, every)
        self._saved_usd_per_s = {size: saved_usd_per_s(prices, allocation) for size, allocation in own.items()}
        self._counted = 0
        """Invocations of earlier steps."""

    def choose(self, fleet: SimulatedFleet, ledger: SimulatedLedger, now_s: float) -> LearnerShape | None:
        """See ChoosesSize."""
        record, calls = ledger.steps[-1], ledger.invocations[self._counted :]
        self._counted, before, done = len(ledger.invocations), self._size, len(ledger.steps)
        if done == 1 or done >= self._terms.steps:
            return None
        learn_s, alone_s = learning(calls, FunctionName.LEARNER, record.start_s)
        self._speeds.observe(before, learn_s, learned_tokens(calls, FunctionName.LEARNER))
        measured = StepMeasured(
            size=before,
            step_s=record.end_s - record.start_s,
            learn_s=learn_s,
            alone_s=alone_s,
            others_usd_per_s=self._released_usd_per_s + self._held_usd_per_s(fleet),
            change_s=self._change_s,
            steps_left=self._terms.steps - done,
            speeds=self._speeds.relative_to(before.kind),
        )
        contract = contract_for_step(
            self._terms.of_step(done),
            steps_left=self._terms.steps_left(done),
            spent_s=now_s,
            spent_usd=self._spent_usd(fleet, ledger, now_s),
        )
        choice = choose_size(measured, self._saved_usd_per_s, contract)
        if choice.size == before:
            return None
        shape = self._sizes.changed(before, choice, ledger, now_s)
        self._size, self._change_s = choice.size, shape.slot_setup.start_s
        return shape

    def _held_usd_per_s(self, fleet: SimulatedFleet) -> float:
        """What a release of all other replicas would save."""
        return sum(
            saved_usd_per_s(self._prices, replica.life.identity.allocation)
            for slot, replica in fleet.replicas.items()
            if fleet.setup.functions[slot] != FunctionName.LEARNER and not replica.asleep
        )

    def _spent_usd(self, fleet: SimulatedFleet, ledger: SimulatedLedger, now_s: float) -> float:
        """Of holdings that have ended, and of those that have not."""
        open_usd = sum(
            max(now_s - replica.life.since_s, 0.0) * share * self._prices.device(device.kind).usd_per_hour
            for replica in fleet.replicas.values()
            for device, share in replica.life.identity.allocation.shared
            if not replica.asleep
        )
        return self._prices.cost_usd(ledger.holdings) + open_usd / SECONDS_PER_HOUR
