"""Compute the figures of a simulated run, step by step, from its trace alone. Pure.

A step's window lasts from the end of the previous step to its own end, so that the windows cover the run, starts and
waits included; with overlapping steps (one_step_off) a window is the cost of one more step. The bill of a window is

holdings within it x price  +  the cost of devices while they are not held

and the second part is 0 for devices that were rented by themselves and are given back. Nodes that are rented whole are
paid for until the run ends. Owned devices are paid for anyway, less what other users pay for them. A policy whose users
reserve all devices for the whole run also pays for devices that it leaves idle.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rlhfless.records import Holding
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import billed_s, leased_usd, length, union, usage
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.statistics import (
    Interval,
    mean_interval,
    positive_interval,
    quantile,
    ratio,
    ratio_interval,
    share_interval,
)
from rlhfless.spec import CheapestSpec, ContractSpec, FastestSpec


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step. Device-seconds count accelerators; CPU cores count only in the cost."""

    step: int
    time_s: float
    """Length of its window."""
    step_s: float
    """From its own start to its end."""
    generation_s: float
    usd: float
    busy_device_s: float
    idle_device_s: float
    """Held while nothing ran; reserved or owned devices that are not held do not count."""
    cold_device_s: float
    response_tokens: float
    limit: float | None = None
    """Deadline in seconds, or budget in US dollars, that the contract gave this step; None without a limit."""
    kept: bool | None = None
    """Whether the limit was kept."""


@dataclass(frozen=True, slots=True)
class DeviceSupply:
    """The devices that the policy may hold."""

    count: Mapping[str, int]
    """Number of devices by kind."""
    reserved: bool
    """Whether devices that are not held are paid for as well."""
    spare: Mapping[str, int] = field(default_factory=dict)
    """Devices by kind that the policy never holds, and that cost what their release does not earn: owned devices, and
    others on the nodes that it rents."""


def step_figures(trace: Trace, prices: PriceBook, devices: DeviceSupply) -> list[StepFigures]:
    """Return one entry per step.

    Raises PriceError for a device kind without a price, LedgerError for broken holdings.
    """
    ends = [record.end_s for record in trace.steps]
    last_s = max((holding.end_s for holding in trace.holdings), default=0.0)
    bounds = [0.0, *ends[:-1], max(ends[-1], last_s)] if ends else []
    held = _by_window(trace.holdings, bounds)
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    figures = []
    by_incarnation = defaultdict(list)
    for call in trace.invocations:
        by_incarnation[call.incarnation].append(call)
        calls[call.incarnation].append((call.start_s, call.end_s))
    # Rounding by the seller belongs to the machines, not to a step: it is divided evenly.
    rounding_usd = _rounding_usd(trace.holdings, bounds, prices, devices) / max(len(ends), 1)
    for index, record in enumerate(trace.steps):
        within = held[index]
        window_s = bounds[index + 1] - bounds[index]
        on_devices = [each for each in within if each.device_kind != prices.cpu_kind and prices.occupies(each)]
        of_devices = [call for name in {each.incarnation for each in on_devices} for call in by_incarnation[name]]
        used = usage("devices", on_devices, of_devices, prices)
        figures.append(
            StepFigures(
                step=record.step,
                time_s=record.end_s - bounds[index],
                step_s=record.end_s - record.start_s,
                generation_s=record.metrics["generation_s"],
                usd=prices.cost_usd(within) + unheld_usd(on_devices, window_s, prices, devices) + rounding_usd,
                busy_device_s=used.busy_device_s,
                idle_device_s=used.idle_device_s,
                cold_device_s=used.cold_device_s,
                response_tokens=record.metrics["response_tokens"],
            )
        )
    return figures


def _rounding_usd(
    holdings: Sequence[Holding], bounds: Sequence[float], prices: PriceBook, devices: DeviceSupply
) -> float:
    """Return the cost of time billed beyond the holdings; for devices kept for the whole run, beyond the run."""
    whole = {kind for kind in devices.count if devices.reserved or prices.device(kind).rented_by == "node"}
    leased = [holding for holding in holdings if holding.device_kind not in whole]
    run_s = bounds[-1] - bounds[0] if bounds else 0.0
    beyond_usd = math.fsum(
        (devices.count[kind] + devices.spare.get(kind, 0))
        * (billed_s(run_s, prices.device(kind).billing) - run_s)
        * prices.device(kind).usd_per_hour
        for kind in whole
    )
    return leased_usd(leased, prices) - prices.cost_usd(leased) + beyond_usd / SECONDS_PER_HOUR


def unheld_usd(holdings: Sequence[Holding], window_s: float, prices: PriceBook, devices: DeviceSupply) -> float:
    """Return the cost of devices in a window while they are not held."""
    held: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for holding in holdings:
        held[holding.device_kind][holding.device].append((holding.start_s, holding.end_s))
    total = []
    for kind, count in devices.count.items():
        price = prices.device(kind)
        per_hour = price.usd_per_hour if devices.reserved else price.released_usd_per_hour
        held_s = math.fsum(length(union(spans)) for spans in held[kind].values())
        total.append(per_hour * max(count * window_s - held_s, 0.0) / SECONDS_PER_HOUR)
    for kind, count in devices.spare.items():
        total.append(prices.device(kind).released_usd_per_hour * count * window_s / SECONDS_PER_HOUR)
    return math.fsum(total)


def _by_window(holdings: Sequence[Holding], bounds: Sequence[float]) -> list[list[Holding]]:
    """Return the holdings, cut at the bounds [windows + 1], window by window."""
    windows: list[list[Holding]] = [[] for _ in range(max(len(bounds) - 1, 0))]
    for holding in holdings:
        first = max(bisect_left(bounds, holding.start_s) - 1, 0)
        for index in range(first, len(windows)):
            low, high = max(holding.start_s, bounds[index]), min(holding.end_s, bounds[index + 1])
            if bounds[index] >= holding.end_s:
                break
            if high > low:
                windows[index].append(dataclasses.replace(holding, start_s=low, end_s=high))
    return windows


Part = Literal["all", "first", "later"]
"""All steps, the steps of the first epoch, or the steps after it: only then has a policy seen the prompts before."""

MILLION = 1e6

E = TypeVar("E")


def steps_of(steps: Sequence[E], part: Part, epoch_steps: int) -> Sequence[E]:
    """Return the entries of a part of a run, from a list with one entry per step."""
    if part == "all":
        return steps
    return steps[:epoch_steps] if part == "first" else steps[epoch_steps:]


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over some steps of one run."""

    time_s: float
    usd: float
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    response_tokens: float
    steps: int
    p50_s: float
    p99_s: float
    kept: float | None
    """Share of the steps that kept their limit; None without a limit."""

    @classmethod
    def of(cls, steps: Sequence[StepFigures]) -> Totals:
        """Add up steps. Raises ValueError for no steps."""
        walls = [step.step_s for step in steps]
        judged = [step.kept for step in steps if step.kept is not None]
        return cls(
            time_s=math.fsum(step.time_s for step in steps),
            usd=math.fsum(step.usd for step in steps),
            busy_device_s=math.fsum(step.busy_device_s for step in steps),
            idle_device_s=math.fsum(step.idle_device_s for step in steps),
            cold_device_s=math.fsum(step.cold_device_s for step in steps),
            response_tokens=math.fsum(step.response_tokens for step in steps),
            steps=len(steps),
            p50_s=quantile(walls, 0.5),
            p99_s=quantile(walls, 0.99),
            kept=sum(judged) / len(judged) if judged else None,
        )

    @property
    def held_device_s(self) -> float:
        return self.busy_device_s + self.idle_device_s + self.cold_device_s


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One policy over all seeds."""

    label: str
    step_s: Interval
    """Wall time per step, including the waits between steps."""
    step_usd: Interval
    usd_per_million_tokens: Interval
    """Per million response tokens."""
    busy_device_s: Interval
    """Per step, like the next two."""
    idle_device_s: Interval
    cold_device_s: Interval
    utilisation: Interval
    """Busy device-seconds divided by held device-seconds."""
    p50_s: Interval
    """The median of a step's own wall time."""
    p99_s: Interval
    kept: Interval | None
    """Share of the steps that kept their limit."""
    speed_up: Interval
    """Time of the first policy divided by the time of this one, in pairs of equal seeds."""
    cost_ratio: Interval
    """Cost of this policy divided by the cost of the first one, in pairs of equal seeds."""
    regret: Interval | None
    """Share by which the contract's objective is above the clairvoyant's; None without a clairvoyant."""


def row_of(label: str, runs: Sequence[Totals], first: Sequence[Totals], regrets: Sequence[float] | None) -> ResultRow:
    """Return the row of a policy; `runs` and `first` are by seed, in the same order."""

    def mean(figure: Callable[[Totals], float]) -> Interval:
        return positive_interval([figure(run) for run in runs])

    kept = [run.kept for run in runs if run.kept is not None]
    return ResultRow(
        label=label,
        step_s=mean(lambda run: run.time_s / run.steps),
        step_usd=mean(lambda run: run.usd / run.steps),
        usd_per_million_tokens=mean(lambda run: run.usd / run.response_tokens * MILLION),
        busy_device_s=mean(lambda run: run.busy_device_s / run.steps),
        idle_device_s=mean(lambda run: run.idle_device_s / run.steps),
        cold_device_s=mean(lambda run: run.cold_device_s / run.steps),
        utilisation=share_interval(
            [run.busy_device_s / run.held_device_s if run.held_device_s else 0.0 for run in runs]
        ),
        p50_s=mean(lambda run: run.p50_s),
        p99_s=mean(lambda run: run.p99_s),
        kept=share_interval(kept) if kept else None,
        speed_up=ratio_interval([run.time_s for run in first], [run.time_s for run in runs]),
        cost_ratio=ratio_interval([run.usd for run in runs], [run.usd for run in first]),
        regret=None if regrets is None else mean_interval(regrets),
    )


def objective(contract: ContractSpec, run: Totals, best: Totals) -> float:
    """Return the contract's objective relative to `best`; 1 is as good as `best`.

    It is cost under a deadline, time under a budget, or the weighted mean of both.
    """
    time, cost = ratio(run.time_s, best.time_s), ratio(run.usd, best.usd)
    if isinstance(contract, CheapestSpec):
        return cost
    if isinstance(contract, FastestSpec):
        return time
    return contract.time_weight * time + (1 - contract.time_weight) * cost
