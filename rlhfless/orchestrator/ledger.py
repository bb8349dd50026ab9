"""The driver's ledger: records holdings and invocations for the trace, adds up the cost, and times the steps."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.records import (
    Decision,
    Group,
    Holding,
    Invocation,
    ReplicaState,
    StepRecord,
    Work,
)
from rlhfless.records.traces import Trace, TracedRollout, TraceMeta, TraceWriter
from rlhfless.scaling.accounting import Interval, Spent, StepTimes, length, recovery_until_s, step_times, union
from rlhfless.scaling.prices import (
    SECONDS_PER_HOUR,
    Acquired,
    AcquisitionLags,
    PriceBook,
    RentalTerms,
    mean_phases,
    started,
)
from rlhfless.util.clock import monotonic_s, unix_s

log = logging.getLogger(__name__)

MOST_SHOWN = 64
"""Responses of a step that are kept for trackers."""

RECENT_CALLS = 512
"""Number of recent calls per function from which times are estimated: tens of steps, so that they follow the run."""

NEWEST_CALLS = 512
"""Maximum calls in one report to the service: more than a hundred actors make in a second."""


NOTHING = Trace(TraceMeta("", 0, {}, {}, {}))
"""The earlier trace of a run without earlier attempts."""


def held_s(trace: Trace) -> float:
    """Return the seconds in which the attempts of a trace held devices."""
    return length(union((holding.start_s, holding.end_s) for holding in trace.holdings))


class Ledger:
    """Collects the records of a run; `write` writes them to disk."""

    def __init__(self, writer: TraceWriter, prices: PriceBook, earlier: Trace = NOTHING) -> None:
        """`earlier`: the trace of earlier attempts of the run."""
        self._writer = writer
        self.prices = prices
        self._closed_usd = prices.cost_usd(earlier.holdings)
        self._rollouts_of = {rollout.step for rollout in earlier.rollouts}
        """Steps with rollouts in the trace."""
        self._steps = {record.step for record in earlier.steps}
        self._written_s = monotonic_s()
        self._behind = False
        self._step = 0
        self._calls: list[Invocation] = []
        """Calls of the steps in progress."""
        self._newest: deque[Invocation] = deque(maxlen=NEWEST_CALLS)
        self.calls = 0
        """Number of calls in this attempt."""
        self._drawn: dict[int, list[TracedRollout]] = defaultdict(list)
        self._shown: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        """By step: see `responses`."""
        """Rollouts of the steps in progress, by step."""
        self._holdings = list(earlier.holdings)
        self._invocations = list(earlier.invocations)
        self._starts: dict[str, dict[str, Interval]] = defaultdict(dict)
        """By function and incarnation: the start and end of its cold start."""
        for holding in sorted(earlier.holdings, key=attrgetter("start_s")):
            self._add_start(holding)
        self._earlier_device_s = sum(holding.device_s for holding in earlier.holdings if prices.occupies(holding))
        self.earlier_held_s = held_s(earlier)
        """Seconds in which earlier attempts held devices."""
        self._device_s = 0.0
        self._since_s: float | None = None
        """Unix time at which the first holding of this attempt began."""
        self._engine_starts = list(started(earlier.decisions))
        """Seconds of each phase, for each engine start."""
        self._lags = AcquisitionLags(prices, Acquired.of(earlier.decisions))
        self._recent: dict[str, deque[Invocation]] = defaultdict(lambda: deque(maxlen=RECENT_CALLS))

    def add_holding(self, holding: Holding) -> None:
        self._writer.add(holding)
        self._holdings.append(holding)
        self._device_s += holding.device_s if self.prices.occupies(holding) else 0.0
        self._since_s = holding.start_s if self._since_s is None else min(self._since_s, holding.start_s)
        self._closed_usd += self.prices.cost_usd([holding])
        self._add_start(holding)

    def _add_start(self, holding: Holding) -> None:
        """Note a cold start. A flush of the ledger splits it into several holdings; a wake-up comes later."""
        if holding.state is ReplicaState.STARTING:
            starts = self._starts[holding.function]
            start_s, end_s = starts.get(holding.incarnation, (holding.start_s, holding.start_s))
            if holding.start_s <= end_s:
                starts[holding.incarnation] = start_s, max(end_s, holding.end_s)

    def calls_after(self, count: int) -> list[Invocation]:
        """Return the calls after the first `count` of this attempt, at most the last NEWEST_CALLS."""
        newest = list(self._newest)
        return newest[max(len(newest) - (self.calls - count), 0) :]

    def add_invocation(self, invocation: Invocation) -> None:
        self._writer.add(invocation)
        self._invocations.append(invocation)
        self._calls.append(invocation)
        self._newest.append(invocation)
        self.calls += 1
        self._recent[invocation.function].append(invocation)

    def has_rollouts_of(self, step: int) -> bool:
        """See FleetFigures."""
        return step in self._rollouts_of

    def has_step(self, step: int) -> bool:
        """Return whether the step is in the trace."""
        return step in self._steps

    def add_rollouts(self, step: int, groups: Iterable[Group]) -> None:
        """Add the rollouts of a step, with the scores of its samples. A simulated step has none to add."""
        self._rollouts_of.add(step)
        for group in groups:
            self._writer.add_prompt(group.prompt)
            prompt_tokens = len(group.prompt.token_ids)
            for sample in group.samples:
                row = self._writer.add_rollout(step, sample.rollout, sample.scored, prompt_tokens)
                self._drawn[step].append(row)
                if row.text is not None and len(self._shown[step]) < MOST_SHOWN:
                    shown = {"prompt": group.prompt.text, "response": row.text, "reward": row.reward}
                    self._shown[step].append(shown | {"prompt_id": row.prompt_id, "sample": row.sample_index})

    def responses(self, step: int) -> list[Mapping[str, Any]]:
        """Return the first MOST_SHOWN responses of a step in progress with their prompts; none unless tokens are
        recorded."""
        return self._shown.pop(step, [])

    def add_decision(self, decision: Decision) -> None:
        self._engine_starts += started([decision])
        self._writer.add(decision)

    def add_acquired(self, acquired: Acquired) -> None:
        """Record a wait for devices."""
        self._lags.add(acquired)
        self.add_decision(acquired.decision(self._step))

    def reacquire_s(self, kind: str) -> float:
        """Return the expected wait for devices of a kind on a node that is not in the cluster yet: see
        AcquisitionLags."""
        return self._lags.lag_s(kind)

    def terms(self, kinds: Collection[str]) -> RentalTerms:
        """See FleetFigures. They are those of the price book, with the measured waits."""
        lag_s = max(self.reacquire_s(kind) for kind in kinds)
        return RentalTerms.of([self.prices.device(kind).billing for kind in sorted(kinds)], lag_s)

    def add_step(self, record: StepRecord, others_since_s: float | None = None) -> None:
        """Add a finished step, and forget its calls, except those since `others_since_s`, the start of the other steps
        in progress."""
        self._steps.add(record.step)
        self._step = record.step
        self._writer.add(record)
        since_s = record.end_s if others_since_s is None else others_since_s
        self._calls = [call for call in self._calls if call.end_s > since_s]
        self._drawn.pop(record.step, None)

    def cost_usd(self, pools: Iterable[ReplicaPool]) -> float:
        """See FleetFigures."""
        return self._closed_usd + sum(
            device_s * self.prices.device(kind).usd_per_hour / SECONDS_PER_HOUR for kind, device_s in _open(pools)
        )

    def spent(self, pools: Collection[ReplicaPool]) -> Spent:
        """Return the cost, device-seconds and held seconds of all attempts so far."""
        device_s = self._earlier_device_s + self._device_s + sum(device_s for _, device_s in _open(pools))
        held_s = self.earlier_held_s + (0.0 if self._since_s is None else unix_s() - self._since_s)
        return Spent(self.cost_usd(pools), device_s, held_s)

    def records(self) -> tuple[list[Holding], list[Invocation]]:
        """Return the closed holdings and the calls of all attempts, for the run's bill."""
        return list(self._holdings), list(self._invocations)

    def held_until_s(self) -> dict[str, float]:
        """Return the end of the last holding of each incarnation, in unix time."""
        return {each.incarnation: each.end_s for each in sorted(self._holdings, key=attrgetter("end_s"))}

    def calls_since(self, at_s: float) -> list[Invocation]:
        """Return the calls of all attempts that ended after `at_s` (unix time)."""
        return [call for call in self._invocations if call.end_s > at_s]

    def mean_start_s(self, function: str) -> float | None:
        """See FleetFigures."""
        starts = self._starts.get(function)
        return fmean(end_s - start_s for start_s, end_s in starts.values()) if starts else None

    def mean_start_phases(self) -> dict[str, float]:
        """See FleetFigures."""
        return mean_phases(self._engine_starts)

    def mean_load_s(self) -> float:
        """See FleetFigures."""
        loads = [
            call.duration_s for recent in self._recent.values() for call in recent if call.work is Work.LOAD_WEIGHTS
        ]
        return sum(loads) / len(loads) if loads else 0.0

    def done_in_step(self, step: int) -> tuple[tuple[Invocation, ...], tuple[TracedRollout, ...]]:
        """See FleetFigures."""
        return tuple(call for call in self._calls if call.step == step), tuple(self._drawn[step])

    def step_times(self, begun: StepAttempt, end_s: float) -> StepTimes:
        """Return the time spent in each phase of a step in progress, up to `end_s`."""
        metrics: dict[str, float] = {}
        if begun.recovers:
            metrics["recovery_s"] = max(recovery_until_s(begun.step, begun.tried_s, self._calls) - begun.start_s, 0.0)
        return step_times(StepRecord(begun.step, begun.start_s, end_s, metrics), self._calls)

    def write(self, pools: Iterable[ReplicaPool]) -> None:
        """Write all rows to disk, including open holdings so far. Raises OSError if the disk is full; the rows are then
        kept."""
        self._written_s = monotonic_s()
        for pool in pools:
            for replica in pool.replicas():
                replica.cut()
        self._behind = True
        self._writer.flush(self._step)
        self._behind = False

    def keep_up(self, pools: Iterable[ReplicaPool], lag_s: float) -> None:
        """Write all rows if the last write is at least `lag_s` ago. On a full disk only warn; `catch_up` retries."""
        if monotonic_s() - self._written_s >= lag_s:
            try:
                self.write(pools)
            except OSError as error:
                log.warning("the trace could not be written; the end of the step tries again: %s", error)

    def catch_up(self, pools: Iterable[ReplicaPool]) -> None:
        """Retry a failed write. Raises OSError if the disk is still full."""
        if self._behind:
            self.write(pools)

    def close(self) -> None:
        """Write the remaining rows, and close the writer."""
        self._writer.close()


def _open(pools: Iterable[ReplicaPool]) -> Iterator[tuple[str, float]]:
    """Yield the device kind and device-seconds of each open holding."""
    for pool in pools:
        for replica in pool.replicas():
            yield from replica.open_device_s.items()


@dataclass(slots=True)
class StepAttempt:
    """The start times of a step's attempt, in unix time."""

    step: int
    start_s: float
    """Start of its first attempt, or the end of the previous step if that was later, so that steps do not overlap."""
    tried_s: float
    """Start of the current attempt."""
    recovers: bool
    """Whether the step is repeated after a fault, or started while no generation actor was up. The time until the first
    work of this attempt then counts as recovery."""


class StepClock:
    """Times the steps, so that the steps add up to the time of the run.

    A step starts at the end of the previous one, unless other work came in between; it includes the closing of the
    previous step. A repeated step counts from its first attempt. A step that is generated while another one is learned
    counts from the end of that one.
    """

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        """Start of the first attempt of each unfinished step."""
        self._last: dict[int, StepAttempt] = {}
        """The last attempt of each unfinished step."""
        self._ended = 0
        """The highest step that has ended. A new learner may repeat steps up to it, which then end again."""
        self._ended_s: float | None = None
        """End of the last step; None if work other than closing it came after."""

    def begin(self, step: int, *, fleet_is_up: bool) -> StepAttempt:
        """Record the start of a step, or of a repetition, and return the attempt."""
        now_s, before = unix_s(), self._last.get(step)
        first_s = now_s if self._ended_s is None else self._ended_s
        start_s = first_s if before is None else before.start_s
        self._ended_s = None
        self._first_s.setdefault(step, first_s)
        begun = self._last[step] = StepAttempt(step, start_s, now_s, before is not None or not fleet_is_up)
        return begun

    def interrupt(self) -> None:
        """Record the start of work that belongs to no step, such as an evaluation."""
        self._ended_s = None

    def resume(self) -> None:
        """Record the end of the work between two steps. If it belonged to no step, steps that are already being
        generated count from here."""
        if self._ended_s is None:
            self._move_starts(unix_s())

    def end(self, step: int, end_s: float) -> float:
        """Record the end of a step; return the start of the earliest other step in progress, or `end_s` if there is
        none."""
        self._first_s.pop(step, None)
        self._last.pop(step, None)
        if step > self._ended:
            self._ended = step
            self._move_starts(end_s)
        self._ended_s = end_s
        return min(self._first_s.values(), default=end_s)

    def _move_starts(self, at_s: float) -> None:
        for begun in self._last.values():
            begun.start_s = max(begun.start_s, at_s)
