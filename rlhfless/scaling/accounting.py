"""Billing of a run, computed from its holdings and invocations alone. Pure.

The device-seconds of a function are split three ways:

    cold   held while STARTING (waking included)
    busy   held in any other state, while an invocation of the same incarnation was running
    idle   otherwise: waiting, draining, suspect, and asleep if the price book has no price for sleep

so that busy + idle + cold = provisioned. The cost is the sum of holdings x price, regardless of the work done. If sleep
in host memory has a price, a sleeping replica is billed at that price and holds no device. Overlapping invocations are
counted once: a device is either busy or not. Work during a cold start is part of the start.

The wall time of a step is split by kind of work (`step_times`), and the seller's rounding is added per lease
(`leased_usd`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from types import MappingProxyType

import numpy as np

from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, StepRecord, Work, in_order
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.prices import SECONDS_PER_HOUR, Acquired, Billing, PriceBook, RentalTerms, started
from rlhfless.spec import LimitsSpec
from rlhfless.spec.rewards import JUDGE_PREFIX
from rlhfless.spec.teachers import FUNCTION_PREFIX

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the response length: the median, and the tail that determines how long a step takes."""


_COMPUTED, _UNIQUE = f"{PROMPT_TOKENS_COMPUTED}/", f"{PROMPT_TOKENS_UNIQUE}/"
_WHOLE_PASSES = (Work.LOGPROBS, Work.LEARN)
"""Calls whose time is proportional to the tokens of a batch."""


class LedgerError(ValueError):
    """Raised for holdings that overlap or end before they start. The message names the incarnation."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The device time and work of one function, or of the whole run."""

    name: str
    """A function's name, or `total`."""
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    cost_usd: float
    invocations: int
    cold_starts: int
    input_tokens: int
    output_tokens: int

    @property
    def provisioned_device_s(self) -> float:
        return self.busy_device_s + self.idle_device_s + self.cold_device_s


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """How close a run came to computing each prompt token once, over all functions and steps."""

    computed_tokens: float
    unique_tokens: float
    saved: float
    """Fraction of the steps' time saved in the reference and the learner, assuming that their time is proportional to
    their tokens. Excludes the time saved by an engine's prefix cache, which the trace does not record."""
    evicted_tokens: int = 0
    """Computed tokens that engines had cached earlier and evicted."""

    @property
    def once(self) -> float:
        """Return the fraction of the computed prompt tokens that had to be computed; 1 if each was computed once."""
        return min(self.unique_tokens / self.computed_tokens, 1.0) if self.computed_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run."""

    functions: tuple[Usage, ...]
    """One entry per function with holdings or invocations, in their order (`in_order`)."""
    total: Usage
    steps: tuple[StepTimes, ...]
    response_tokens: Mapping[float, float]
    """Quantiles (see QUANTILES) of the response length over all rollouts; empty without rollouts."""
    prompts: PromptReuse | None
    acquired: tuple[Acquired, ...] = ()
    """Devices that the run had to wait for."""
    engine_starts: tuple[Mapping[str, float], ...] = ()
    """Seconds per phase (StartPhase) of each engine start."""
    pools_usd: Mapping[str, float] = field(default_factory=dict)
    """Cost of each teacher and judge if it had held its devices alone, for the whole run."""

    @property
    def cost_usd(self) -> float:
        return self.total.cost_usd


def summarise(trace: Trace, prices: PriceBook) -> Summary:
    """Return the cost and the figures of a run.

    Raises LedgerError if holdings overlap, and PriceError for a device kind without a price.
    """
    check_holdings(trace.holdings)
    functions = [
        usage(
            name,
            [holding for holding in trace.holdings if holding.function == name],
            [call for call in trace.invocations if call.function == name],
            prices,
        )
        for name in in_order(
            [*(held.function for held in trace.holdings), *(call.function for call in trace.invocations)]
        )
    ]
    steps = tuple(map(step_times, trace.steps, calls_within(trace.steps, trace.invocations)))
    return Summary(
        functions=tuple(row for row in functions if row.invocations or row.provisioned_device_s),
        total=usage("total", trace.holdings, trace.invocations, prices),
        steps=steps,
        response_tokens=_length_quantiles(trace.rollouts),
        prompts=_prompt_reuse(trace, math.fsum(times.wall_s for times in steps)),
        acquired=tuple(Acquired.of(trace.decisions)),
        engine_starts=tuple(started(trace.decisions)),
        pools_usd=_pools_usd(trace, prices),
    )


def _pools_usd(trace: Trace, prices: PriceBook) -> dict[str, float]:
    devices: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for holding in trace.holdings:
        if holding.function.startswith((FUNCTION_PREFIX, JUDGE_PREFIX)):
            devices[holding.function].add((holding.device, holding.device_kind))
    if not devices:
        return {}
    lasted_s = max(each.end_s for each in trace.holdings) - min(each.start_s for each in trace.holdings)
    return {
        function: lasted_s / SECONDS_PER_HOUR * math.fsum(prices.device(kind).usd_per_hour for _, kind in sorted(held))
        for function, held in devices.items()
    }


def usage(name: str, holdings: Sequence[Holding], invocations: Sequence[Invocation], prices: PriceBook) -> Usage:
    """Return the usage of one function, or of the whole run, from its holdings and invocations."""
    work = _by_incarnation(invocations)
    busy: list[float] = []
    idle: list[float] = []
    cold: list[float] = []
    for holding in holdings:
        if holding.state is ReplicaState.STARTING:
            cold.append(holding.device_s)
        elif prices.occupies(holding):
            worked = clip(work.get(holding.incarnation, []), holding.start_s, holding.end_s)
            busy_s = length(worked)
            busy.append(busy_s * holding.share)
            idle.append((holding.duration_s - busy_s) * holding.share)
    return Usage(
        name=name,
        busy_device_s=math.fsum(busy),
        idle_device_s=math.fsum(idle),
        cold_device_s=math.fsum(cold),
        cost_usd=prices.cost_usd(holdings),
        invocations=len(invocations),
        cold_starts=len(cold_starts(holdings)),
        input_tokens=sum(call.input_tokens for call in invocations),
        output_tokens=sum(call.output_tokens for call in invocations),
    )


def check_holdings(holdings: Iterable[Holding]) -> None:
    """Raise LedgerError unless each incarnation of a replica holds each device in one state at a time."""

    def place(holding: Holding) -> tuple[str, str, str]:
        return holding.replica, holding.incarnation, holding.device

    ordered = sorted(holdings, key=lambda holding: (place(holding), holding.start_s, holding.end_s))
    for holding in ordered:
        if not holding.end_s >= holding.start_s:
            raise LedgerError(f"{_label(holding)} ends before it starts; correct the writer of the ledger")
    for _, group in groupby(ordered, key=place):
        for first, second in pairwise(group):
            if second.start_s < first.end_s:
                raise LedgerError(
                    f"{_label(second)} overlaps {_label(first)}: it would be billed twice; "
                    "close a holding before the next one of its incarnation starts"
                )


def cold_starts(holdings: Iterable[Holding]) -> list[Interval]:
    """Return the start and end of every cold start and wake-up.

    A start counts once even if ledger flushes split it into several holdings or it holds several devices.
    """
    spans = {
        (holding.replica, holding.incarnation, holding.start_s, holding.end_s)
        for holding in holdings
        if holding.state is ReplicaState.STARTING
    }
    starts: list[Interval] = []
    for _, pieces in groupby(sorted(spans), key=lambda span: span[:2]):
        starts += union((start_s, end_s) for _, _, start_s, end_s in pieces)
    return starts


def _prompt_reuse(trace: Trace, wall_s: float) -> PromptReuse | None:
    """Return the prompt reuse of a run whose steps took `wall_s` in total, or None if the trace has no such figures."""
    values = [(name, value) for record in trace.steps for name, value in record.metrics.items()]
    computed = math.fsum(value for name, value in values if name.startswith(_COMPUTED))
    unique = math.fsum(value for name, value in values if name.startswith(_UNIQUE))
    if not computed:
        return None
    evicted = sum(call.evicted_tokens for call in trace.invocations)
    saved_s = math.fsum(
        call.duration_s * call.cached_tokens / (call.input_tokens - call.cached_tokens)
        for call in trace.invocations
        if call.work in _WHOLE_PASSES and call.input_tokens > call.cached_tokens
    )
    return PromptReuse(computed, unique, saved_s / (saved_s + wall_s), evicted)


def _by_incarnation(invocations: Iterable[Invocation]) -> dict[str, list[Interval]]:
    calls: dict[str, list[Interval]] = defaultdict(list)
    for call in invocations:
        calls[call.incarnation].append((call.start_s, call.end_s))
    return {incarnation: union(intervals) for incarnation, intervals in calls.items()}


def _length_quantiles(rollouts: Sequence[TracedRollout]) -> dict[float, float]:
    lengths = [rollout.response_tokens for rollout in rollouts]
    return {q: float(np.quantile(lengths, q)) for q in QUANTILES} if lengths else {}


def _label(holding: Holding) -> str:
    replica = f"{holding.replica} (incarnation {holding.incarnation}) on {holding.device}"
    return f"the {holding.state} holding of {replica} from {holding.start_s:.3f} to {holding.end_s:.3f}"


@dataclass(frozen=True, slots=True)
class Spent:
    """Total usage of all attempts of a run."""

    cost_usd: float
    device_s: float
    held_s: float
    """Time during which the run held devices."""


def reached(limits: LimitsSpec, spent: Spent) -> str:
    """Return the first limit reached, with its key and figures, or "" if none is."""
    figures = (
        ("max_cost_usd", limits.max_cost_usd, spent.cost_usd),
        ("max_device_hours", limits.max_device_hours, spent.device_s / SECONDS_PER_HOUR),
        ("max_wall_clock_s", limits.max_wall_clock_s, spent.held_s),
    )
    for key, limit, value in figures:
        if limit is not None and value >= limit:
            return f"limits.{key} is {limit:g}, and the run has used {value:.4g}"
    return ""


class Phase(StrEnum):
    """A kind of work in a step."""

    GENERATION = "generation"
    HELD_OUT = "held_out"
    SCORING = "scoring"
    REFERENCE = "reference"
    TEACHER = "teacher"
    """Logprobs of teachers."""
    CRITIC = "critic"
    """The critic's values and its updates."""
    COLUMNS = "columns"
    """Per-token outputs and updates of the user's own functions."""
    LEARN = "learn"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"


PHASES: Mapping[Work, Phase] = MappingProxyType(
    {
        Work.GENERATE: Phase.GENERATION,
        Work.PRECOMPUTE: Phase.GENERATION,
        Work.HELD_OUT: Phase.HELD_OUT,
        Work.SCORE: Phase.SCORING,
        Work.LOGPROBS: Phase.REFERENCE,
        Work.EVALUATE: Phase.LEARN,  # the learner's own pass over the batch, before its first update
        Work.LEARN: Phase.LEARN,
        Work.PUBLISH: Phase.SYNC,
        Work.LOAD_WEIGHTS: Phase.SYNC,
        Work.SLEEP: Phase.SYNC,
        Work.WAKE: Phase.SYNC,
        Work.CHECKPOINT: Phase.CHECKPOINT,
        Work.RESTORE: Phase.CHECKPOINT,
    }
)

_COLUMN_PHASES: Mapping[str, Phase] = MappingProxyType(
    {
        FunctionName.REFERENCE: Phase.REFERENCE,
        FunctionName.LEARNER: Phase.REFERENCE,  # without its adapters
        FunctionName.CRITIC: Phase.CRITIC,
    }
)


def phase_of(call: Invocation) -> Phase:
    """Return the phase of a call.

    Functions other than the learner that compute a per-token output or learn have phases of their own.
    """
    phase = PHASES[call.work]
    learns_apart = phase is Phase.LEARN and call.function != FunctionName.LEARNER
    return column_phase(call.function) if phase is Phase.REFERENCE or learns_apart else phase


def column_phase(function: str) -> Phase:
    if function.startswith(FUNCTION_PREFIX):
        return Phase.TEACHER
    return _COLUMN_PHASES.get(function, Phase.COLUMNS)


OVERHEAD = frozenset({Work.PUBLISH, Work.LOAD_WEIGHTS})
"""Work that exists only because learner and engines are separate processes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The wall time of one step, by kind of work."""

    step: int
    wall_s: float
    phases_s: Mapping[Phase, float]
    """Wall time, after the recovery, in which work of this phase ran. Phases may overlap."""
    overhead_s: float
    """Wall time in which no function worked. Moving weights (OVERHEAD) does not count as work."""
    recovery_s: float
    """Wall time before the successful try. Work in it is excluded from all figures except `wall_s`."""


def step_times(step: StepRecord, invocations: Iterable[Invocation]) -> StepTimes:
    """Split a step's wall time by the work that ran within it, including work for other steps.

    wall = recovery + overhead + the time in which at least one function worked.
    """
    phases: dict[Phase, list[Interval]] = defaultdict(list)
    working: list[Interval] = []
    for call in invocations:
        if call.start_s < step.end_s and call.end_s > step.resumed_s:
            within = (max(call.start_s, step.resumed_s), min(call.end_s, step.end_s))
            phases[phase_of(call)].append(within)
            if call.work not in OVERHEAD:
                working.append(within)
    covered_s = length(union(working))
    return StepTimes(
        step=step.step,
        wall_s=step.end_s - step.start_s,
        phases_s={phase: length(union(phases[phase])) for phase in Phase},
        overhead_s=max(step.end_s - step.resumed_s - covered_s, 0.0),
        recovery_s=step.resumed_s - step.start_s,
    )


def recovery_until_s(step: int, tried_s: float, invocations: Iterable[Invocation]) -> float:
    """Return the end of a step's recovery: the first work of a function after the last try started at `tried_s`.

    Before that, new replicas start and load weights. Returns `tried_s` if no function worked.
    """
    works = (call.start_s for call in invocations if call.step == step and call.work not in OVERHEAD)
    return min((start_s for start_s in works if start_s >= tried_s), default=tried_s)


def calls_within(steps: Iterable[StepRecord], invocations: Iterable[Invocation]) -> Iterator[list[Invocation]]:
    """Yield, for each step, the calls that may overlap it, without scanning the whole run for each step."""
    ordered = sorted(invocations, key=attrgetter("start_s"))
    latest_s = list(accumulate((call.end_s for call in ordered), max))
    for step in steps:
        last = bisect_left(ordered, step.end_s, key=attrgetter("start_s"))
        yield ordered[bisect_right(latest_s, step.start_s) : last]


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same instants as sorted, disjoint, non-empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals, in seconds."""
    return math.fsum(end - start for start, end in disjoint)


def clip(disjoint: list[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of sorted, disjoint intervals within [start, end)."""
    first = max(bisect_right(disjoint, (start, math.inf)) - 1, 0)
    inside = disjoint[first : bisect_left(disjoint, (end, -math.inf))]
    if inside and inside[0][1] <= start:
        del inside[0]
    if inside:
        inside[0] = (max(inside[0][0], start), inside[0][1])
        inside[-1] = (inside[-1][0], min(inside[-1][1], end))
    return inside


@dataclass(frozen=True, slots=True)
class BilledLease:
    """A lease of a device: from the first replica that holds it until no replica does and the paid time is over.

    A replica that takes the device within the paid time continues the lease.
    """

    device: str
    device_kind: str
    start_s: float
    end_s: float
    paid_until_s: float
    held_s: float
    """Time during which a replica held the device."""

    @property
    def unused_s(self) -> float:
        """Return the paid time in which no replica held the device."""
        return self.paid_until_s - self.start_s - self.held_s


def billed_s(held_s: float, billing: Billing | None) -> float:
    """Return the seconds that the seller bills for a machine kept for `held_s`."""
    return RentalTerms.of([billing], reacquire_s=0.0).paid_until_s(0.0, held_s)


def leases(holdings: Iterable[Holding], prices: PriceBook) -> list[BilledLease]:
    """Return the leases behind the holdings, by device and time. Raises PriceError for a kind without a price."""
    held: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for holding in holdings:
        if prices.occupies(holding):
            held[holding.device_kind, holding.device].append((holding.start_s, holding.end_s))
    return [
        lease
        for (kind, device), intervals in sorted(held.items())
        for lease in _of_device(device, kind, union(intervals), prices.device(kind).billing)
    ]


def leased_usd(holdings: Iterable[Holding], prices: PriceBook) -> float:
    """Return the cost of the holdings including the seller's rounding: `cost_usd` plus paid time without a replica.

    Equal to `cost_usd` if no kind has `billing`. Raises PriceError for a kind without a price.
    """
    known = list(holdings)
    unused = (
        lease.unused_s * prices.device(lease.device_kind).usd_per_hour / SECONDS_PER_HOUR
        for lease in leases(known, prices)
    )
    return prices.cost_usd(known) + math.fsum(unused)


def _of_device(device: str, kind: str, disjoint: list[Interval], billing: Billing | None) -> list[BilledLease]:
    merged: list[BilledLease] = []
    for start_s, end_s in disjoint:
        held_s = end_s - start_s
        if merged and start_s <= merged[-1].paid_until_s:
            before = merged.pop()
            start_s, held_s = before.start_s, before.held_s + held_s
        merged.append(BilledLease(device, kind, start_s, end_s, start_s + billed_s(end_s - start_s, billing), held_s))
    return merged
