"""A learner whose number of devices changes between two steps, as in a live run (rlhfless.loop.learner_size): the live
choice (rlhfless.scaling.learner_ranks), by the times of the step that has ended.

A change ends the group, and starts one on other devices; the seconds of its start are in the shape of each size. The
first step is not measured, because it has the starts. Devices that a smaller group leaves are given back.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless.records import Decision, FunctionName
from rlhfless.scaling.learner_ranks import (
    LEARNER_RANKS,
    GroupSize,
    SizeChoice,
    StepMeasured,
    choose_size,
    learning,
    released_usd_per_s,
    saved_usd_per_s,
)
from rlhfless.scaling.plan import RunContract, contract_for_step
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.ledger import SimulatedLedger
from rlhfless.sim.setup import LearnerShape, Setup


class SimulatedLearnerSize:
    """The number of devices of a simulated learner."""

    def __init__(self, shapes: Mapping[int, LearnerShape], setup: Setup, terms: RunContract, prices: PriceBook) -> None:
        """`shapes`: the sizes that it may have, by number of devices; it begins with the largest."""
        self._shapes = shapes
        self._terms = terms
        self._prices = prices
        self._kind = shapes[max(shapes)].slot_setup.allocation.devices[0].kind
        self._size = GroupSize(max(shapes), self._kind)
        every = (device for slot_setup in setup.slot_setups for device in slot_setup.allocation.devices)
        self._released_usd_per_s = released_usd_per_s(prices, every)
        self._saved_usd_per_s = {
            GroupSize(count, self._kind): saved_usd_per_s(prices, shape.slot_setup.allocation)
            for count, shape in shapes.items()
        }
        self._counted = 0
        """Invocations of earlier steps."""

    def choose(self, fleet: SimulatedFleet, ledger: SimulatedLedger, now_s: float) -> LearnerShape | None:
        """The learner's shape from now on; None while it stays. Called at the end of each step."""
        record, calls = ledger.steps[-1], ledger.invocations[self._counted :]
        self._counted, before, done = len(ledger.invocations), self._size, len(ledger.steps)
        if done == 1 or done >= self._terms.steps:
            return None
        learn_s, alone_s = learning(calls, FunctionName.LEARNER, record.start_s)
        measured = StepMeasured(
            size=before,
            step_s=record.end_s - record.start_s,
            learn_s=learn_s,
            alone_s=alone_s,
            others_usd_per_s=self._released_usd_per_s + self._held_usd_per_s(fleet),
            change_s=self._shapes[before.ranks].slot_setup.start_s,
            steps_left=self._terms.steps - done,
            speeds={self._kind: 1.0},
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
        self._size = choice.size
        ledger.decisions.append(_decision(record.step, now_s, before, choice))
        return self._shapes[choice.size.ranks]

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


def _decision(step: int, at_s: float, before: GroupSize, choice: SizeChoice) -> Decision:
    inputs: dict[str, float | int | str | bool] = {"before": str(before), "reason": choice.reason, **choice.figures}
    return Decision(step, at_s, LEARNER_RANKS, str(choice.size), inputs)
