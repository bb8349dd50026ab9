"""How the wall time of a step was spent, from its record and the invocations alone. Pure.

It is split by kind of work. Kinds of work overlap (scoring runs while generation goes on). `outside_s` is the time in
which no function did a step's real work: calls on their way, weights being published and loaded, the driver's own
bookkeeping. `recovery_s` is the time lost by a fault: the failed tries of the step, the replacement of lost
replicas, the steps that a new learner had to take again, and the wait for new replicas.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType

from rlhfless.records import FunctionName, Invocation, StepRecord, Work
from rlhfless.scaling.intervals import Interval, length, union


class Phase(StrEnum):
    """A kind of work in a step."""

    GENERATION = "generation"
    HELD_OUT = "held_out"
    SCORING = "scoring"
    REFERENCE = "reference"
    CRITIC = "critic"
    """The critic's values and its updates."""
    COLUMNS = "columns"
    """Columns and updates of the user's own functions."""
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
        Work.PROVE_LOADING: Phase.SYNC,
        Work.LOAD_WEIGHTS: Phase.SYNC,
        Work.SLEEP: Phase.SYNC,
        Work.WAKE: Phase.SYNC,
        Work.CHECKPOINT: Phase.CHECKPOINT,
        Work.RESTORE: Phase.CHECKPOINT,
    }
)

_COLUMN_PHASES: Mapping[str, Phase] = MappingProxyType(
    {FunctionName.REFERENCE: Phase.REFERENCE, FunctionName.CRITIC: Phase.CRITIC}
)


def phase_of(call: Invocation) -> Phase:
    """The phase of a call. Several functions compute a column of the batch or learn; each counts under its own name."""
    phase = PHASES[call.work]
    learns_apart = phase is Phase.LEARN and call.function != FunctionName.LEARNER
    return column_phase(call.function) if phase is Phase.REFERENCE or learns_apart else phase


def column_phase(function: str) -> Phase:
    """The phase of a function that computes a column of the batch."""
    return _COLUMN_PHASES.get(function, Phase.COLUMNS)


OVERHEAD = frozenset({Work.PUBLISH, Work.PROVE_LOADING, Work.LOAD_WEIGHTS})
"""Work that exists only because learner and engines are separate; a single process would not have it."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The wall time of one step, by kind of work."""

    step: int
    wall_s: float
    phases_s: Mapping[Phase, float]
    """Wall time in which work of this phase ran, from the end of the recovery on. Phases may overlap."""
    outside_s: float
    """Wall time in which no function worked; moving weights (OVERHEAD) does not count as work."""
    recovery_s: float
    """Wall time before the successful try; work in it is in no phase, and in no other figure but `wall_s`."""


def step_times(step: StepRecord, invocations: Iterable[Invocation]) -> StepTimes:
    """Splits a step's wall time by what ran within it, whichever step that work was for.

    wall = recovery + outside + the time in which at least one function worked.
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
        outside_s=max(step.end_s - step.resumed_s - covered_s, 0.0),
        recovery_s=step.resumed_s - step.start_s,
    )


def recovery_until_s(step: int, tried_s: float, invocations: Iterable[Invocation]) -> float:
    """When the recovery of a step ended, with the last try begun at `tried_s`: when the first function worked in it.

    Until then new replicas start and load weights. `tried_s` if no function worked.
    """
    works = (call.start_s for call in invocations if call.step == step and call.work not in OVERHEAD)
    return min((start_s for start_s in works if start_s >= tried_s), default=tried_s)


def calls_within(steps: Iterable[StepRecord], invocations: Iterable[Invocation]) -> Iterator[list[Invocation]]:
    """For each step the calls that may overlap it, without a pass over the whole run for each step."""
    ordered = sorted(invocations, key=attrgetter("start_s"))
    latest_s = list(accumulate((call.end_s for call in ordered), max))
    for step in steps:
        last = bisect_left(ordered, step.end_s, key=attrgetter("start_s"))
        yield ordered[bisect_right(latest_s, step.start_s) : last]
