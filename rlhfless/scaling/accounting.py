"""The bill of a run, from its holdings and invocations alone. Pure.

Device-seconds of a function are split three ways:

    cold   held while STARTING (waking included)
    busy   held in any other state, while an invocation of the same incarnation was running
    idle   otherwise: waiting, draining, suspect, and asleep if the book has no price for sleep

so that busy + idle + cold = provisioned, and the cost is the sum of holdings x price, whatever work was done in
them. If sleep in host memory has a price, a sleeping replica is billed at that price, and holds no device. Invocations
that overlap are counted once: a device is busy or not. Work during a cold start is part of the start.

rlhfless.scaling.step_times splits the time of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from rlhfless.records import Holding, Invocation, ReplicaState, Work, in_order
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.acquisition import Acquired, started
from rlhfless.scaling.intervals import Interval, clip, length, union
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.scaling.step_times import StepTimes, calls_within, step_times
from rlhfless.spec import LimitsSpec

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the response length: the median, and the tail that decides how long a step takes."""


_COMPUTED, _UNIQUE = f"{PROMPT_TOKENS_COMPUTED}/", f"{PROMPT_TOKENS_UNIQUE}/"
_WHOLE_PASSES = (Work.LOGPROBS, Work.LEARN)
"""Calls that compute nothing but tokens of a batch, so that their time is in proportion to these."""


class LedgerError(ValueError):
    """Holdings that cannot be billed: they overlap, or end before they start. The message names the incarnation."""


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
    """How far all functions and steps of a run computed each prompt token once."""

    computed_tokens: float
    unique_tokens: float
    saved: float
    """Part of the steps' time that was saved in reference and learner, if that time is in proportion to their tokens.
    The time that an engine's prefix cache saves is not in the trace, and not in here."""
    evicted_tokens: int = 0
    """Computed tokens that engines had had in their caches before."""

    @property
    def once(self) -> float:
        """Part of the computed prompt tokens that had to be computed: 1 if each was computed once."""
        return min(self.unique_tokens / self.computed_tokens, 1.0) if self.computed_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures."""

    functions: tuple[Usage, ...]
    """One entry per function with holdings or invocations, in their order (`in_order`)."""
    total: Usage
    steps: tuple[StepTimes, ...]
    response_tokens: Mapping[float, float]
    """Quantiles (see QUANTILES) of the response length over all rollouts; empty if there are none."""
    prompts: PromptReuse | None
    acquired: tuple[Acquired, ...] = ()
    """Devices that were waited for."""
    engine_starts: tuple[Mapping[str, float], ...] = ()
    """The seconds of the phases of each start of an engine, by StartPhase."""

    @property
    def cost_usd(self) -> float:
        return self.total.cost_usd


def summarise(trace: Trace, prices: PriceBook) -> Summary:
    """The bill and the figures of a run.

    Raises LedgerError if holdings overlap, PriceError for a device kind without a price.
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
    )


def usage(name: str, holdings: Sequence[Holding], invocations: Sequence[Invocation], prices: PriceBook) -> Usage:
    """The usage of one function, or of the whole run, from its holdings and invocations."""
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
    """Raises LedgerError unless each life of a replica holds each device in one state at a time."""

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
    """Start and end of every start and wake-up.

    A start that flushes of the ledger have cut into pieces counts once; so does a start that holds several devices.
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
    """`wall_s` is the time of all steps. None if the trace has no such figures."""
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
    """What all attempts of a run have spent together."""

    cost_usd: float
    device_s: float
    held_s: float
    """Time in which the run held devices."""


def reached(limits: LimitsSpec, spent: Spent) -> str:
    """The limit that is reached, with its key and figures; empty if none is."""
    figures = (
        ("max_cost_usd", limits.max_cost_usd, spent.cost_usd),
        ("max_device_hours", limits.max_device_hours, spent.device_s / SECONDS_PER_HOUR),
        ("max_wall_clock_s", limits.max_wall_clock_s, spent.held_s),
    )
    for key, limit, value in figures:
        if limit is not None and value >= limit:
            return f"limits.{key} is {limit:g}, and the run has used {value:.4g}"
    return ""
