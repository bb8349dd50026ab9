"""The learner of a recorded run: its work, and the sizes between which it changed. Pure.

A run whose learner changed its size has a decision for each change. A replay as recorded changes it where the run did,
and one with a policy by the live choice, between the sizes that the run's spec allows, whether or not memory would; a
change takes as long as it took. The seconds of a size at which nothing was recorded are those of the first one, with as
many times the seconds per token as its ranks are slower together, by data sheets. Without a change the learner keeps
its size in a replay, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from rlhfless.records import Decision, FunctionName, Invocation, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.learner_ranks import CHANGED_IN_S, LEARNER_RANKS, GroupSize, SizeChoice, rank_rates
from rlhfless.scaling.placement import Allocation, Device, rank_devices
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.learner_size import LearnerSizes
from rlhfless.sim.ledger import SimulatedLedger
from rlhfless.sim.replay.fleet import RecordedFleet, slot_setup_of, start_s_of
from rlhfless.sim.replay.latency_file import LatencyFile, LearnerFit
from rlhfless.sim.setup import LearnerShape


@dataclass(frozen=True, slots=True)
class SizeChanges:
    """The changes of a recorded learner's size."""

    first: GroupSize
    """The size that the run began with."""
    decisions: tuple[Decision, ...]
    """In order of time, those that changed it."""

    @classmethod
    def of(cls, trace: Trace) -> SizeChanges | None:
        """None of a run whose learner kept its size."""
        rows = (row for row in trace.decisions if row.kind == LEARNER_RANKS and row.choice != row.inputs["before"])
        decisions = sorted(rows, key=attrgetter("at_s"))
        return cls(GroupSize.parse(str(decisions[0].inputs["before"])), tuple(decisions)) if decisions else None

    def after(self, step: int) -> GroupSize:
        """The size after the end of a step. After a fault it changes within a step, which is then done again."""
        made = [row.choice for row in self.decisions if row.step < step + (1 if CHANGED_IN_S in row.inputs else 2)]
        return GroupSize.parse(made[-1]) if made else self.first

    def at(self, at_s: float) -> GroupSize:
        """The size from a time on (unix)."""
        before = [row.choice for row in self.decisions if row.at_s <= at_s]
        return GroupSize.parse(before[-1]) if before else self.first


class RecordedSize:
    """The size of a learner in a replay, as it was: a ChoosesSize."""

    def __init__(self, changes: SizeChanges, sizes: LearnerSizes) -> None:
        self._changes = changes
        self._sizes = sizes
        self._size = next(iter(sizes.shapes))

    def choose(self, fleet: SimulatedFleet, ledger: SimulatedLedger, now_s: float) -> LearnerShape | None:  # noqa: ARG002
        """See ChoosesSize. A size that the run's spec does not allow any more is left out."""
        before, after = self._size, self._changes.after(ledger.steps[-1].step)
        if after == before or after not in self._sizes.shapes:
            return None
        self._size = after
        return self._sizes.changed(before, SizeChoice(after, "as recorded", {}), ledger, now_s)


def learned_by_size(trace: Trace, calls: Iterable[Invocation]) -> dict[GroupSize, list[Invocation]]:
    """The calls of a trace in which the learner evaluated and learned, by its size then, the first one first: of sizes
    at which it learned, in a run whose learner changed its size."""
    changes = SizeChanges.of(trace)
    if changes is None:
        return {}
    by_size: dict[GroupSize, list[Invocation]] = defaultdict(list)
    for call in calls:
        if call.function == FunctionName.LEARNER and call.work in (Work.EVALUATE, Work.LEARN):
            by_size[changes.at(call.start_s)].append(call)
    return {size: of for size, of in by_size.items() if any(call.work is Work.LEARN for call in of)}


def with_learner(trace: Trace, latency: LatencyFile, size: GroupSize) -> LatencyFile:
    """The latencies of a run with a learner of another size. Raises UnknownDevice for one of several kinds without a
    data sheet."""
    changes, ranks = SizeChanges.of(trace), trace.meta.spec.get("learner", {}).get("ranks")
    held = RecordedFleet(trace).allocation(FunctionName.LEARNER)
    first = GroupSize(ranks, held.devices[0].kind) if isinstance(ranks, int) else size
    fits = _fits(latency, first if changes is None else changes.first)
    fit = _fit(fits, size, rank_rates({size.kind, *(GroupSize.parse(each).kind for each in fits)}))
    return latency.model_copy(update={"evaluate": fit.evaluate, "learn": fit.learn})


def learner_of(trace: Trace, latency: LatencyFile, allocation: Allocation) -> LearnerShape:
    """The learner of a run in which it keeps its size."""
    ranks = trace.meta.spec.get("learner", {}).get("ranks", 1)
    fit = LearnerFit(evaluate=latency.evaluate, learn=latency.learn)
    return _shape(trace, latency, fit, allocation, ranks if isinstance(ranks, int) else 1)


def learner_sizes(trace: Trace, latency: LatencyFile) -> LearnerSizes | None:
    """The sizes of a run's learner in a replay, the one that it begins with first; None if it keeps its size. Raises
    UnknownDevice for one of several kinds without a data sheet."""
    changes = SizeChanges.of(trace)
    sizes = [] if changes is None else _allowed(trace, changes.first)
    if changes is None or len(sizes) == 1:
        return None
    fits = _fits(latency, changes.first)
    rates = rank_rates({size.kind for size in (*sizes, *map(GroupSize.parse, fits))})
    shapes = {
        size: _shape(trace, latency, _fit(fits, size, rates), allocation, size.ranks)
        for size, allocation in _allocations(trace, changes, sizes).items()
    }
    return LearnerSizes(shapes, _change_s(trace, changes.decisions), rates)


def epochs_of(trace: Trace, function: str) -> int:
    """Passes of a function that learns over the batch of a step."""
    own = (trace.meta.spec.get(function) or {}).get("epochs")
    return int(own or trace.meta.spec.get("epochs", 1))


def _shape(trace: Trace, latency: LatencyFile, fit: LearnerFit, allocation: Allocation, ranks: int) -> LearnerShape:
    evaluates = fit.evaluate
    return LearnerShape(
        slot_setup_of(allocation, 0.0),
        fit.learn.fixed_s + (evaluates.fixed_s if evaluates else 0.0),
        evaluates.token_s if evaluates else 0.0,
        fit.learn.token_s,
        latency.publish_s,
        int(trace.meta.spec.get("mini_batches", 1)) * ranks,
        epochs_of(trace, FunctionName.LEARNER),
    )


def _fits(latency: LatencyFile, first: GroupSize) -> Mapping[str, LearnerFit]:
    """By size. `first`: that of a run whose learner kept it."""
    return latency.learner_sizes or {str(first): LearnerFit(evaluate=latency.evaluate, learn=latency.learn)}


def _fit(fits: Mapping[str, LearnerFit], size: GroupSize, rates: Mapping[str, float]) -> LearnerFit:
    """The seconds of a size: its own, or those of the first of `fits`, by the rates of their ranks."""
    if str(size) in fits:
        return fits[str(size)]
    first, fit = next(iter(fits.items()))
    base = GroupSize.parse(first)
    return fit.times(base.ranks * rates[base.kind] / (size.ranks * rates[size.kind]))


def _allowed(trace: Trace, first: GroupSize) -> list[GroupSize]:
    """The sizes of the run's spec: fewer ranks than the first size has, and other kinds."""
    spec = trace.meta.spec
    fewest = (spec.get("learner") or {}).get("min_ranks") or first.ranks
    elsewhere = (spec.get("placement") or {}).get("learner_elsewhere") or {}
    fewer = (GroupSize(count, first.kind) for count in range(first.ranks - 1, fewest - 1, -1))
    return [first, *fewer, *(GroupSize(count, kind) for kind, count in elsewhere.items())]


def _allocations(trace: Trace, changes: SizeChanges, sizes: Sequence[GroupSize]) -> dict[GroupSize, Allocation]:
    """The devices of each size: those that it had first in the run, or else a part of the first size's, or some of the
    other kind."""
    fleet, held = RecordedFleet(trace), dict[GroupSize, Allocation]()
    for life in fleet.lives(FunctionName.LEARNER):
        held.setdefault(changes.at(life.start_s), life.allocation)
    whole = held.get(changes.first) or fleet.allocation(FunctionName.LEARNER)

    def planned(size: GroupSize) -> Allocation:
        if size.kind != changes.first.kind:
            return Allocation.of([Device(f"learner-{size.kind}-{i}", size.kind, i) for i in range(size.ranks)])
        ranks = changes.first.ranks
        parts = {device for each in range(size.ranks) for device in rank_devices(whole.devices, each, ranks)}
        devices, shares = zip(*((device, share) for device, share in whole.shared if device in parts), strict=True)
        return Allocation(devices, shares)

    return {size: whole if size == changes.first else held.get(size) or planned(size) for size in sizes}


def _change_s(trace: Trace, decisions: Sequence[Decision]) -> Callable[[GroupSize, GroupSize], float]:
    """Seconds of a change: the median of such changes in the run, or of all, or of the learner's starts, which are what
    a run expects before its first change."""
    took_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in decisions:
        if CHANGED_IN_S in row.inputs:
            took_s[str(row.inputs["before"]), row.choice].append(float(row.inputs[CHANGED_IN_S]))
    every, start_s = [each for of in took_s.values() for each in of], start_s_of(trace, FunctionName.LEARNER)

    def change_s(before: GroupSize, after: GroupSize) -> float:
        if before == after:
            return start_s
        return median(took_s.get((str(before), str(after))) or every or [start_s])

    return change_s
