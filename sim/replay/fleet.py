"""The fleet of a recorded run, without its losses: replicas that followed each other share one slot. Pure.

A lost replica is replaced by another one, under another name and usually on the same devices. The replayed fleet is
therefore the fleet of one moment: of the moments with the most functions on devices, the first with the most actors.
Its replicas held their devices at the same time, so they fit. An actor from another time counts as the actor whose slot
it took.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import cold_starts
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.sim.setup import LearnerShape, SlotSetup


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a replica that has started."""

    function: str
    replica: str
    allocation: Allocation
    start_s: float  # unix time
    end_s: float


class RecordedFleet:
    """The slots of a run's actors.

    Raises TraceError for a trace without generation actors, and for one with prefill actors, which no simulated fleet
    has.
    """

    def __init__(self, trace: Trace) -> None:
        self._run_id = trace.meta.run_id
        self._lives = _lives(trace)
        if any(life.function == FunctionName.PREFILL for life in self._lives):
            raise TraceError(
                f"the run {self._run_id} computed prompts on prefill actors, and a simulated fleet has none; name the "
                "trace of a run without scaling.prefill"
            )
        self._together = _most_at_once(self._lives)
        self._slots: dict[str, list[tuple[Life, int]]] = defaultdict(list)
        """By actor: its lives with their slots. A later attempt of a run may reuse a name."""
        chosen = [life for life in self._together if life.function == FunctionName.GENERATION]
        if not chosen:
            raise TraceError(f"the trace of {self._run_id} has no generation actor; name the trace of a whole run")
        self.actors = tuple(life.allocation for life in sorted(chosen, key=lambda life: life.replica))
        """By slot."""
        self._take_slots(sorted(chosen, key=lambda life: life.replica))

    def allocation(self, function: str) -> Allocation:
        """Return the allocation of a function's replica. Raises TraceError if the run had none."""
        of_function = (life for life in (*self._together, *self._lives) if life.function == function)
        first = next(of_function, None)
        if first is None:
            raise TraceError(f"the trace of {self._run_id} has no {function}; name the trace of a whole run")
        return first.allocation

    def lives(self, function: str) -> list[Life]:
        """Return the lives of a function's replicas, in the order of their starts."""
        return [life for life in self._lives if life.function == function]

    def slot_of(self, actor: str, at_s: float) -> int:
        """Return the slot of the actor with this name at a time (unix)."""
        return min(self._slots[actor], key=lambda one: max(one[0].start_s - at_s, at_s - one[0].end_s, 0.0))[1]

    def _take_slots(self, chosen: Sequence[Life]) -> None:
        """Assign a slot to every other actor, preferably with the same devices, then preferably free."""
        until_s = [-math.inf] * len(chosen)
        slot_of = {id(life): slot for slot, life in enumerate(chosen)}
        for life in self._lives:
            if life.function != FunctionName.GENERATION:
                continue
            slot = slot_of.get(id(life))
            if slot is None:
                slot = min(
                    range(len(chosen)),
                    key=lambda index: (self.actors[index] != life.allocation, until_s[index] > life.start_s, index),
                )
            until_s[slot] = max(until_s[slot], life.end_s)
            self._slots[life.replica].append((life, slot))


def slot_setup_of(allocation: Allocation, start_s: float) -> SlotSetup:
    """Return a slot next to others: the live fleet keeps all functions of a device awake, each with its share."""
    return SlotSetup(allocation, "recorded", start_s, beside=True)


def start_s_of(trace: Trace, function: str) -> float:
    """Return the median seconds of the function's cold starts, also of those given up; 0 without any."""
    starts = cold_starts([holding for holding in trace.holdings if holding.function == function])
    return median(end_s - start_s for start_s, end_s in starts) if starts else 0.0


def _lives(trace: Trace) -> list[Life]:
    """Return the lives of all replicas that have started, in the order of their starts."""
    held: dict[tuple[str, str, str], list[Holding]] = defaultdict(list)
    for holding in trace.holdings:
        held[holding.function, holding.replica, holding.incarnation].append(holding)
    lives = [
        Life(function, replica, _allocation(of), min(h.start_s for h in of), max(h.end_s for h in of))
        for (function, replica, _), of in held.items()
        if any(holding.state is not ReplicaState.STARTING for holding in of)
    ]
    if trace.meta.spec.get("placement", {}).get("tenants", 1) > 1:
        lives = _side_by_side(lives)
    return sorted(lives, key=lambda life: (life.start_s, life.function, life.replica))


def _side_by_side(lives: Sequence[Life]) -> list[Life]:
    """Divide devices among the functions of a run that held each device whole in its turn, next to other runs.

    The replayed fleets have no other runs, so that its functions share each device.
    """
    of_function: dict[tuple[str, str], float] = defaultdict(float)
    for life in lives:
        for device, share in life.allocation.shared:
            of_function[device.name, life.function] = max(of_function[device.name, life.function], share)
    whole: dict[str, float] = defaultdict(float)
    for (device_name, _), share in of_function.items():
        whole[device_name] += share
    return [
        replace(
            life,
            allocation=replace(
                life.allocation,
                shares=tuple(share / max(whole[device.name], 1.0) for device, share in life.allocation.shared),
            ),
        )
        for life in lives
    ]


def _allocation(held: Sequence[Holding]) -> Allocation:
    by_device = {holding.device: holding for holding in reversed(held)}
    in_order = sorted(by_device.items())
    return Allocation(
        tuple(Device(name, holding.device_kind, index) for index, (name, holding) in enumerate(in_order)),
        tuple(holding.share for _, holding in in_order),
    )


def _most_at_once(lives: Sequence[Life]) -> list[Life]:
    """Return the lives at the first moment with the most functions, and of such moments with the most actors."""
    now: list[Life] = []
    best: list[Life] = []
    most = 0, 0
    for life in lives:
        now = [*(other for other in now if other.end_s > life.start_s), life]
        count = len({other.function for other in now}), sum(each.function == FunctionName.GENERATION for each in now)
        if count > most:
            most, best = count, now
    return best


def with_learner(trace: Trace, latency: LatencyFile, ranks: int, kind: str) -> LatencyFile:
    """Scale a run's fit to a learner with another number of ranks, or on another kind of device by data sheets.

    Raises UnknownDevice for a kind without a data sheet.
    """
    recorded_kind = RecordedFleet(trace).allocation(FunctionName.LEARNER).devices[0].kind
    factor = _ranks(trace, ranks) / ranks
    if kind != recorded_kind:
        recorded, other = (device_of(each) for each in (recorded_kind, kind))
        factor *= recorded.flops_per_s.value * recorded.matmul_efficiency.value
        factor /= other.flops_per_s.value * other.matmul_efficiency.value
    evaluate = None if latency.evaluate is None else latency.evaluate.times(factor)
    return latency.model_copy(update={"evaluate": evaluate, "learn": latency.learn.times(factor)})


def learner_of(trace: Trace, latency: LatencyFile, allocation: Allocation) -> LearnerShape:
    """Return the learner of a replay, on these devices."""
    evaluate = latency.evaluate
    return LearnerShape(
        slot_setup_of(allocation, 0.0),
        latency.learn.fixed_s + (evaluate.fixed_s if evaluate else 0.0),
        evaluate.token_s if evaluate else 0.0,
        latency.learn.token_s,
        latency.publish_s,
        int(trace.meta.spec.get("mini_batches", 1)) * _ranks(trace, 1),
        epochs_of(trace, FunctionName.LEARNER),
    )


def epochs_of(trace: Trace, function: str) -> int:
    """Return the passes of a function that learns over the batch of a step."""
    own = (trace.meta.spec.get(function) or {}).get("epochs")
    return int(own or trace.meta.spec.get("epochs", 1))


def _ranks(trace: Trace, default: int) -> int:
    ranks = trace.meta.spec.get("learner", {}).get("ranks")
    return ranks if isinstance(ranks, int) else default
