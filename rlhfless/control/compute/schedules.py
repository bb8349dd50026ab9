"""The schedules of a run side by side on its devices: time, cost and how old samples get; and where overlap loses.

Older samples are a price of their own, and the order of sums with streaming is a small one, so a schedule that overlaps
has to save time. It cannot where generation and learning share the devices, whose work then adds up, or where one of
the two takes nearly the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfless.control.compute.prediction import Predicted
from rlhfless.prepare.memory.changes import Question
from rlhfless.records import FunctionName
from rlhfless.spec import AsyncSpec, AutoSpec, OneStepOffSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.streaming import waits_for

LEAST_SAVING = AutoSpec().least_saving
"""Share of a step of `sync` that an overlap has to save."""


Predict = Callable[[Question], tuple[Predicted | None, str | None]]
"""The prediction of a run, or why there is none."""


def schedules_of(asked: Question, predict: Predict) -> list[dict[str, Any]]:
    """PlannedSchedule of each: `sync`, also with streaming, one step off, and asynchronous as in the spec or by
    default. None of a run that draws nothing."""
    if asked.spec.supervised:
        return []
    own = asked.spec.schedule
    ahead: tuple[ScheduleSpec, ...] = (OneStepOffSpec(), own if isinstance(own, AsyncSpec) else AsyncSpec())
    schedules: list[ScheduleSpec] = [SyncSpec(), SyncSpec(streaming=True), *ahead]
    found = [predict(asked.with_schedule(schedule)) for schedule in schedules]
    base = found[0][0]
    return [
        {
            "schedule": schedule.type,
            "streaming": schedule.streaming,
            "max_staleness": schedule.max_staleness,
            "step_s": None if one is None else one.cost.step_s,
            "step_usd": None if one is None else one.cost.cost_usd / one.cost.steps,
            "refused": why or (_refused(asked, schedule, one, base) if one is not None and base is not None else None),
        }
        for schedule, (one, why) in zip(schedules, found, strict=True)
    ]


def _refused(asked: Question, schedule: ScheduleSpec, one: Predicted, sync: Predicted) -> str | None:
    """Why a schedule that overlaps brings nothing; None if it does."""
    if schedule.streaming:
        if why := waits_for(asked.spec):
            return why
    elif not schedule.max_staleness:
        return None
    elif asked.spec.placement.in_turns:
        return "functions take turns on their devices: nothing overlaps"
    elif asked.spec.placement.mode == "colocated":
        return "generation and learning share the devices: their work adds up, and samples get older for nothing"
    saved = 1 - one.cost.step_s / sync.cost.step_s
    if saved >= LEAST_SAVING:
        return None
    shares = {name: sync.shares.get(name, 0.0) for name in (FunctionName.GENERATION, FunctionName.LEARNER)}
    longer = max(shares, key=lambda name: shares[name])
    return f"it saves {max(saved, 0):.0%} of a step: {longer} alone takes {shares[longer]:.0%} of one with sync"
