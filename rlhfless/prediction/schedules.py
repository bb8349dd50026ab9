"""Comparison of a run's schedules on its devices: time, cost and staleness of samples. The contract chooses among them
within the spec's bound on staleness.

Older samples and a different order of the data have a price of their own, so each schedule must save time compared with
`sync`. A schedule that overlaps cannot if generation and learning share the devices, where their work adds up, or if
one of the two takes nearly the whole step. A schedule that defers long responses to later steps cannot if lengths
hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlhfless.planning.memory_plan import Question
from rlhfless.prediction.simulated import Predicted
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
"""Minimum share of a `sync` step that another schedule must save, to justify older samples or a different order of
the data."""


NO_SCHEDULES: dict[str, Any] = {"schedules": [], "schedule_reason": None}

Predict = Callable[[Question], tuple[Predicted | None, str | None]]
"""Returns the prediction of a run, or the reason that there is none."""


@dataclass(frozen=True, slots=True)
class _Tried:
    schedule: ScheduleSpec
    found: Predicted | None
    refused: str | None

    @property
    def figures(self) -> tuple[float, float]:
        """Return seconds and US dollars of the run."""
        assert self.found is not None
        return self.found.cost.wall_s, self.found.cost.cost_usd

    def planned(self, chosen: _Tried | None) -> dict[str, Any]:
        """Return a PlannedSchedule."""
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
    """Return `schedules` and `schedule_reason` of PlanObject, empty for a supervised run.

    They cover `sync` and the others, as in the spec or by default, and the plan's choice among them.
    """
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
    """Return the schedule that meets the contract best, among those that the spec allows and that are worthwhile."""
    open_ = [each for each in tried if each.found is not None and not each.refused and _allowed(spec, each.schedule)]
    if not open_:
        return None
    return open_[best_of([each.figures for each in open_], spec.scaling.contract, limit_of_run(spec))]


def _allowed(spec: RunSpec, schedule: ScheduleSpec) -> bool:
    """Return whether a schedule respects the spec's bound on staleness and its order of the data."""
    in_order = not isinstance(schedule, PartialSpec) or spec.schedule.type == schedule.type
    return in_order and schedule.max_staleness <= spec.schedule.max_staleness


def limit_of_run(spec: RunSpec) -> float | None:
    """Return the contract's limit on the whole run, in seconds or US dollars."""
    contract = spec.scaling.contract
    if isinstance(contract, WeightedSpec):
        return None
    limit = contract.deadline_s if isinstance(contract, CheapestSpec) else contract.budget_usd
    return limit if contract.per == "run" else limit * spec.steps


def _reason(spec: RunSpec, tried: Sequence[_Tried], chosen: _Tried) -> str:
    """Explain the choice, which overlaps are refused, and what a higher bound on staleness would save."""
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
    try:
        RunSpec.model_validate({**asked.spec.model_dump(mode="json"), "schedule": schedule})
    except ValidationError as error:
        return None, error.errors()[0]["msg"].removeprefix("Value error, ")
    return predict(asked.with_schedule(schedule))


def _refused(asked: Question, schedule: ScheduleSpec, one: Predicted, sync: Predicted) -> str | None:
    """Return the reason that a schedule is not worthwhile, or None if it is."""
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
