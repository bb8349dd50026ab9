"""The schedules of a run side by side on its devices: time, cost and how old samples get; and where overlap loses.

Older samples and another order of the data are prices of their own, and the order of sums with streaming is a small
one, so each schedule has to save time against `sync`. One that overlaps cannot where generation and learning share the
devices, whose work then adds up, or where one of the two takes nearly the whole step; one that leaves long responses to
later steps cannot where lengths hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from rlhfless.control.compute.prediction import Predicted
from rlhfless.prepare.memory.changes import Question
from rlhfless.records import FunctionName
from rlhfless.spec import (
    AsyncSpec,
    AutoSpec,
    OneStepOffSpec,
    PartialSpec,
    RunSpec,
    ScheduleSpec,
    SyncSpec,
    TailBatchingSpec,
)
from rlhfless.spec.streaming import waits_for

LEAST_SAVING = AutoSpec().least_saving
"""Share of a step of `sync` that another schedule has to save."""


Predict = Callable[[Question], tuple[Predicted | None, str | None]]
"""The prediction of a run, or why there is none."""


def schedules_of(asked: Question, predict: Predict) -> list[dict[str, Any]]:
    """PlannedSchedule of each: `sync`, also with streaming, and the others as in the spec or by default. None of a run
    that draws nothing."""
    if asked.spec.supervised:
        return []
    own = asked.spec.schedule
    kinds = (PartialSpec, TailBatchingSpec, OneStepOffSpec, AsyncSpec)
    others: list[ScheduleSpec] = [own if isinstance(own, kind) else kind() for kind in kinds]
    schedules = [SyncSpec(), SyncSpec(streaming=True), *others]
    found = [_predicted(asked, schedule, predict) for schedule in schedules]
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


def _predicted(asked: Question, schedule: ScheduleSpec, predict: Predict) -> tuple[Predicted | None, str | None]:
    """The prediction of the run with a schedule, or why there is none, such as that the spec refuses it."""
    try:
        RunSpec.model_validate({**asked.spec.model_dump(mode="json"), "schedule": schedule})
    except ValidationError as error:
        return None, error.errors()[0]["msg"].removeprefix("Value error, ")
    return predict(asked.with_schedule(schedule))


def _refused(asked: Question, schedule: ScheduleSpec, one: Predicted, sync: Predicted) -> str | None:
    """Why a schedule brings nothing; None if it does."""
    if schedule == SyncSpec():
        return None
    if schedule.streaming and (why := waits_for(asked.spec)):
        return why
    if schedule.steps_ahead and asked.spec.placement.mode == "colocated":
        return "generation and learning share the devices: their work adds up, and samples get older for nothing"
    saved = 1 - one.cost.step_s / sync.cost.step_s
    if saved >= LEAST_SAVING:
        return None
    if not (schedule.streaming or schedule.steps_ahead):
        return f"it saves {max(saved, 0):.0%} of a step: the longest responses hold a step up little"
    shares = {name: sync.shares.get(name, 0.0) for name in (FunctionName.GENERATION, FunctionName.LEARNER)}
    longer = max(shares, key=lambda name: shares[name])
    return f"it saves {max(saved, 0):.0%} of a step: {longer} alone takes {shares[longer]:.0%} of one with sync"
