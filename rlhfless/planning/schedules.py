"""The schedules of a run side by side on its devices: time, cost and how old samples get; which of them the contract
chooses within the spec's bound on staleness; and where overlap loses.

Older samples and another order of the data are prices of their own, so each schedule has to save time against `sync`.
One that overlaps cannot where generation and learning share the devices, whose work then adds up, or where one of the
two takes nearly the whole step; one that leaves long responses to later steps cannot where lengths hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlhfless.planning.memory_plan import Question
from rlhfless.planning.prediction import Predicted
from rlhfless.records import FunctionName
from rlhfless.scaling.policies.contract import best_of, contract_for_step, keeps
from rlhfless.spec import (
    AsyncSpec,
    CheapestSpec,
    OneStepOffSpec,
    PartialSpec,
    RunSpec,
    ScheduleSpec,
    SyncSpec,
    WeightedSpec,
)

LEAST_SAVING = 0.03
"""Share of a step of `sync` that another schedule has to save, for older samples or another order of the data."""


NO_SCHEDULES: dict[str, Any] = {"schedules": [], "schedule_reason": None}

Predict = Callable[[Question], tuple[Predicted | None, str | None]]
"""The prediction of a run, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A schedule with its prediction."""

    schedule: ScheduleSpec
    found: Predicted | None
    refused: str | None

    @property
    def figures(self) -> tuple[float, float]:
        """Seconds and US dollars of the run."""
        assert self.found is not None
        return self.found.cost.wall_s, self.found.cost.cost_usd

    def planned(self, chosen: _Tried | None) -> dict[str, Any]:
        """PlannedSchedule."""
        cost = None if self.found is None else self.found.cost
        return {
            "schedule": self.schedule.type,
            "max_staleness": self.schedule.max_staleness,
            "step_s": None if cost is None else cost.step_s,
            "step_usd": None if cost is None else cost.cost_usd / cost.steps,
            "wall_s": None if cost is None else cost.wall_s,
            "cost_usd": None if cost is None else cost.cost_usd,
            "refused": self.refused,
            "chosen": self is chosen,
        }


def schedules_of(asked: Question, predict: Predict) -> dict[str, Any]:
    """`schedules` and `schedule_reason` of PlanObject: `sync`, and the others as in the spec or by default; and which
    of them the plan chooses. Nothing for a supervised run."""
    if asked.spec.supervised:
        return NO_SCHEDULES
    own = asked.spec.schedule
    kinds = (PartialSpec, OneStepOffSpec, AsyncSpec)
    others: list[ScheduleSpec] = [own if isinstance(own, kind) else kind() for kind in kinds]
    tried: list[_Tried] = []
    for schedule in (SyncSpec(), *others):
        found, why = _predicted(asked, schedule, predict)
        base = tried[0].found if tried else found
        if found is not None and base is not None:
            why = _refused(asked, schedule, found, base)
        tried.append(_Tried(schedule, found, why))
    chosen = _chosen(asked.spec, tried)
    return {
        "schedules": [each.planned(chosen) for each in tried],
        "schedule_reason": None if chosen is None else _reason(asked.spec, tried, chosen),
    }


def _chosen(spec: RunSpec, tried: Sequence[_Tried]) -> _Tried | None:
    """The one that meets the contract best, of those that the spec allows and that bring something."""
    open_ = [each for each in tried if each.found is not None and not each.refused and _allowed(spec, each.schedule)]
    if not open_:
        return None
    return open_[best_of([each.figures for each in open_], spec.scaling.contract, limit_of_run(spec))]


def _allowed(spec: RunSpec, schedule: ScheduleSpec) -> bool:
    """Whether samples get no older than the spec's schedule lets them, and are taken in the order of the data or in the
    one that the spec names."""
    in_order = not isinstance(schedule, PartialSpec) or spec.schedule.type == schedule.type
    return in_order and schedule.max_staleness <= spec.schedule.max_staleness


def limit_of_run(spec: RunSpec) -> float | None:
    """The contract's limit on the whole run, in seconds or US dollars."""
    contract = spec.scaling.contract
    if isinstance(contract, WeightedSpec):
        return None
    limit = contract.deadline_s if isinstance(contract, CheapestSpec) else contract.budget_usd
    return limit if contract.per == "run" else limit * spec.steps


def _reason(spec: RunSpec, tried: Sequence[_Tried], chosen: _Tried) -> str:
    """Why one is chosen, which overlap is refused, and what a higher bound on staleness would bring."""
    bound = spec.schedule.max_staleness
    contract = contract_for_step(spec.scaling.contract, steps_left=spec.steps)
    parts = [
        f"{chosen.schedule.type} is chosen by the contract (of a step: {contract}), among schedules whose samples are "
        f"at most {bound} version{'' if bound == 1 else 's'} behind, as with schedule.type {spec.schedule.type}"
    ]
    if keeps(spec.scaling.contract, *chosen.figures, limit_of_run(spec)) is False:
        parts.append("none of them keeps it")
    refused: dict[str, list[str]] = {}
    for each in tried:
        if each.refused and each.schedule.steps_ahead:
            refused.setdefault(each.refused, []).append(each.schedule.type)
    parts += [f"{' and '.join(names)}: refused, {why}" for why, names in refused.items()]
    beyond = [each for each in tried if each.found is not None and not each.refused]
    fastest = min(beyond, key=lambda each: each.figures)
    saved = 1 - fastest.figures[0] / chosen.figures[0]
    if saved >= LEAST_SAVING and not _allowed(spec, fastest.schedule):
        parts.append(
            f"schedule.type {fastest.schedule.type} would save {saved:.0%} of the time, with samples up to "
            f"{fastest.schedule.max_staleness} versions behind"
        )
    return "; ".join(parts)


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
    if schedule.steps_ahead and asked.spec.placement.mode == "colocated":
        return "generation and learning share the devices: their work adds up, and samples get older for nothing"
    saved = 1 - one.cost.step_s / sync.cost.step_s
    if saved >= LEAST_SAVING:
        return None
    saves = (
        f"it {'saves' if saved > 0 else 'costs'} {abs(saved):.0%} of a step" if round(saved, 2) else "it saves nothing"
    )
    if not schedule.steps_ahead:
        return f"{saves}: the longest responses hold a step up little"
    shares = {name: sync.shares.get(name, 0.0) for name in (FunctionName.GENERATION, FunctionName.LEARNER)}
    longer = max(shares, key=lambda name: shares[name])
    return f"{saves}: {longer} alone takes {shares[longer]:.0%} of one with sync"
