"""Whether a replica is kept warm between two uses, or releases its device. Pure.

This is the ski-rental problem. Keeping costs the price of the device for the time until the next use.
Releasing costs one more cold start: the device's price while it starts, and the price of everything that
waits for it meanwhile. They are equal at the break-even time

    break_even_s = cold_start_s * (device price + waiting price) / device price

If the ledger knows how long the gaps between uses are, the cheaper side of their mean is chosen at once.
Either way a replica is never kept idle beyond the break-even time: by that rule a decision made without any
knowledge costs at most twice what perfect foresight would (Karlin, Manasse, Rudolph, Sleator: Competitive
snoopy caching, Algorithmica 3, 1988).

Deliberately not here: which tier to sleep in, and starting ahead of the next use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlhfless.records import Decision, FunctionName, Holding, Invocation
from rlhfless.scaling.accounting import cold_starts
from rlhfless.scaling.prices import SECONDS_PER_HOUR
from rlhfless.spec import Hold


@dataclass(frozen=True, slots=True)
class HoldFigures:
    """What the ledger knows of a function so far. None where it has seen no case yet."""

    mean_gap_s: float | None
    """From the end of its work in one step to when it is wanted for the next."""
    mean_cold_start_s: float | None


@dataclass(frozen=True, slots=True)
class HoldDecision:
    """Keep the replica until `release_after_s` of idle time, or release it now (0)."""

    function: FunctionName
    hold: Hold
    keep: bool
    release_after_s: float
    """Idle time, counted from the end of its last work, at which it is released; infinite for `always`."""
    reason: str
    inputs: dict[str, float | int | str | bool]
    """All it was decided from; figures that the ledger did not have are left out."""

    def record(self, step: int, at_s: float) -> Decision:
        """The decision as the trace keeps it."""
        inputs = {**self.inputs, "function": str(self.function), "hold": self.hold, "reason": self.reason}
        if math.isfinite(self.release_after_s):
            inputs["release_after_s"] = self.release_after_s
        return Decision(step, at_s, "hold" if self.keep else "release", str(self.function), inputs)


def decide_hold(
    function: FunctionName,
    hold: Hold,
    figures: HoldFigures,
    *,
    idle_s: float,
    device_usd_per_hour: float,
    waiting_usd_per_hour: float,
) -> HoldDecision:
    """Decides for a replica that has been idle for `idle_s`.

    `device_usd_per_hour` is the price of what the replica holds; `waiting_usd_per_hour` that of everything
    else that would be held, and wait, during its next cold start.
    """
    inputs: dict[str, float | int | str | bool] = {
        "idle_s": idle_s,
        "device_usd_per_hour": device_usd_per_hour,
        "waiting_usd_per_hour": waiting_usd_per_hour,
    }
    break_even_s = None
    if figures.mean_cold_start_s is not None:
        inputs["mean_cold_start_s"] = figures.mean_cold_start_s
        cold_start_usd_per_hour = device_usd_per_hour + waiting_usd_per_hour
        inputs["cold_start_usd"] = figures.mean_cold_start_s * cold_start_usd_per_hour / SECONDS_PER_HOUR
        if device_usd_per_hour > 0:
            break_even_s = figures.mean_cold_start_s * cold_start_usd_per_hour / device_usd_per_hour
            inputs["break_even_s"] = break_even_s
    if figures.mean_gap_s is not None:
        inputs["mean_gap_s"] = figures.mean_gap_s
        inputs["gap_usd"] = figures.mean_gap_s * device_usd_per_hour / SECONDS_PER_HOUR
    release_after_s, reason = _limit(hold, figures.mean_gap_s, break_even_s)
    if idle_s >= release_after_s:
        return HoldDecision(function, hold, False, 0.0, reason, inputs)
    return HoldDecision(function, hold, True, release_after_s, reason, inputs)


def _limit(hold: Hold, mean_gap_s: float | None, break_even_s: float | None) -> tuple[float, str]:
    """How much idle time is allowed, and why."""
    if hold == "always":
        return math.inf, "the spec says always"
    if hold == "never":
        return 0.0, "the spec says never"
    if break_even_s is None:
        return math.inf, "no cold start has been measured, or the device is free"
    if mean_gap_s is None:
        return break_even_s, "no gap has been measured: keep it until break-even"
    if mean_gap_s > break_even_s:
        return 0.0, "a mean gap costs more than a cold start"
    return break_even_s, "a mean gap costs no more than a cold start: keep it until break-even"


def hold_figures(function: FunctionName, holdings: Iterable[Holding], invocations: Iterable[Invocation]) -> HoldFigures:
    """The figures of one function from the ledger so far.

    A use is all its work of one step. If its replica was started for a use, the gap ends when that start
    began, for then it was wanted: else every release would make the gaps look longer, and so justify
    itself.
    """
    starts = cold_starts([holding for holding in holdings if holding.function is function])
    uses: dict[int, tuple[float, float]] = {}
    for call in invocations:
        if call.function is function:
            start_s, end_s = uses.get(call.step, (math.inf, -math.inf))
            uses[call.step] = (min(start_s, call.start_s), max(end_s, call.end_s))
    gaps: list[float] = []
    for (_, idle_from_s), (used_s, _) in pairwise(sorted(uses.values())):
        wanted_s = min((start_s for start_s, _ in starts if idle_from_s <= start_s < used_s), default=used_s)
        gaps.append(max(wanted_s - idle_from_s, 0.0))
    return HoldFigures(_mean(gaps), _mean([end_s - start_s for start_s, end_s in starts]))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
