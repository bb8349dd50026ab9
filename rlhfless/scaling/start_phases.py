"""The phases of engines' starts, from the rows of the trace's table `decisions` of kind `start`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from rlhfless.records import START, Decision, StartPhase


def started(decisions: Iterable[Decision]) -> list[dict[str, float]]:
    """The starts of engines in these rows: the seconds of each phase, by StartPhase."""
    starts = [decision.inputs for decision in decisions if decision.kind == START]
    return [{name.removesuffix("_s"): float(seconds) for name, seconds in inputs.items()} for inputs in starts]


def mean_phases(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds of each phase, in the order of StartPhase; a phase counts as 0 in a start without it."""
    there = [str(phase) for phase in StartPhase if any(phase in start for start in starts)]
    return {phase: fmean(start.get(phase, 0.0) for start in starts) for phase in there}
