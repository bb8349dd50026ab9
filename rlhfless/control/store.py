"""Reads and writes of the tables. Each function runs within its caller's transaction."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Double, Select, cast, delete, func, or_, select
from sqlalchemy.orm import Session, load_only

from rlhfless.control.database.access import CHANGED
from rlhfless.control.database.tables import (
    EventRow,
    LeaseRow,
    MetricsRow,
    RolloutRow,
    RunRow,
    UsageRow,
)
from rlhfless.control.errors import not_found
from rlhfless.control.lifecycle import AT_REST, DRIVEN, ENDED, DesiredState, Status
from rlhfless.control.objects import MeasuredCost

log = logging.getLogger(__name__)


def run_of(session: Session, run_id: str) -> RunRow:
    """Return a run. Raises ApiError (404)."""
    row = session.get(RunRow, run_id)
    if row is None:
        raise not_found("run", run_id)
    return row


def page(session: Session, query: Select[Any], limit: int) -> tuple[list[Any], bool]:
    """Return the first `limit` rows of a query, and whether there are more."""
    rows = list(session.scalars(query.limit(limit + 1)))
    return rows[:limit], len(rows) > limit


def touch(session: Session, run: RunRow, *events: EventRow) -> None:
    """Mark a run as changed, so that its watchers get the run and these events after the commit."""
    session.info.setdefault(CHANGED, {}).setdefault(run.id, []).extend(events)


def add_event(
    session: Session, run: RunRow, type_: str, message: str, level: str = "info", data: Any = None, at: float = 0.0
) -> None:
    run.last_event += 1
    row = EventRow(
        run_id=run.id,
        seq=run.last_event,
        created_at=at or time.time(),
        level=level,
        type=type_,
        message=message,
        data=data or {},
    )
    session.add(row)
    touch(session, run, row)


def set_status(session: Session, run: RunRow, status: Status, reason: str) -> None:
    """Set a run's status, with an event if it changes.

    A run whose driver has died keeps its lease: the next driver uses the same devices.
    """
    now = time.time()
    before, run.status_reason = run.status, reason
    if status == before:
        touch(session, run)
        return
    run.status, run.status_since = status, now
    if status in ENDED:
        run.finished_at = now
    if status in AT_REST | {Status.QUEUED}:
        run.driver = run.left_s = None
    if status in AT_REST:
        release(session, run)
    log.info("%s: %s -> %s: %s", run.id, before, status, reason)
    level = "error" if status is Status.FAILED else "info"
    add_event(session, run, "status", reason, level, {"status": status, "before": before})


def release(session: Session, run: RunRow) -> None:
    session.execute(delete(LeaseRow).where(LeaseRow.run_id == run.id))


def events(session: Session, run_id: str, after: int, limit: int) -> tuple[list[EventRow], bool]:
    """Return the events of a run after number `after`, oldest first, and whether there are more."""
    query = select(EventRow).where(EventRow.run_id == run_id, EventRow.seq > after).order_by(EventRow.seq)
    return page(session, query, limit)


def usage(session: Session, run_id: str) -> list[UsageRow]:
    return list(session.scalars(select(UsageRow).where(UsageRow.run_id == run_id).order_by(UsageRow.function)))


def measured_cost(session: Session, run_id: str) -> MeasuredCost | None:
    """Return the measured cost of a run's steps after its first."""
    is_step = (MetricsRow.run_id == run_id, MetricsRow.kind == "step")
    cost_usd, step_s = (MetricsRow.values[name].as_float() for name in ("cost_usd", "step_s"))
    ends = select(MetricsRow.step, cost_usd).where(*is_step)
    first = session.execute(ends.order_by(MetricsRow.step).limit(1)).first()
    last = session.execute(ends.order_by(MetricsRow.step.desc()).limit(1)).first()
    if first is None or last is None or first[0] == last[0] or None in (first[1], last[1]):
        return None
    steps, mean_s = session.execute(
        select(func.count(), func.avg(step_s)).where(*is_step, MetricsRow.step > first[0])
    ).one()
    return MeasuredCost(steps=steps, step_s=mean_s, step_usd=(last[1] - first[1]) / steps)


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Selects samples of a run. A field that is None filters nothing."""

    step: int | None = None
    before_step: int | None = None
    """Only samples of earlier steps."""
    data_set: str | None = None
    """`train`, `held_out`, or the name of a data set."""
    prompt_id: str | None = None
    search: str | None = None
    """Text to find in prompt or response."""
    result: str | None = None
    """`failed`, `zero` or `nonzero`. A sample with a failed reward counts as neither `zero` nor `nonzero`."""
    reward: str | None = None
    """The reward part to which `result` applies; None applies it to the total."""


def rollouts(session: Session, run_id: str, wanted: SampleFilter, limit: int) -> list[RolloutRow]:
    """Return samples of a run, newest first."""
    query = select(RolloutRow).where(RolloutRow.run_id == run_id, *_conditions(wanted))
    query = query.order_by(RolloutRow.step.desc(), RolloutRow.place)
    if wanted.result is None:
        return list(session.scalars(query.limit(limit)))
    # A reward name may be any text, and not every database can express every text in a JSON path.
    rows = session.scalars(query.execution_options(yield_per=100))
    return list(islice((row for row in rows if _has_result(row.data, wanted)), limit))


def _has_result(sample: dict[str, Any], wanted: SampleFilter) -> bool:
    name, failures = wanted.reward, sample.get("failures") or {}
    failed = bool(failures) if name is None else name in failures
    if wanted.result == "failed" or failed:
        return failed and wanted.result == "failed"
    value = sample.get("reward") if name is None else (sample.get("rewards") or {}).get(name)
    return value is not None and (value == 0) == (wanted.result == "zero")


def _conditions(wanted: SampleFilter) -> Iterator[ColumnElement[bool]]:
    data = RolloutRow.data
    if wanted.step is not None:
        yield RolloutRow.step == wanted.step
    if wanted.before_step is not None:
        yield RolloutRow.step < wanted.before_step
    if wanted.data_set in ("train", "held_out"):
        yield func.coalesce(data["split"].as_string(), "train") == wanted.data_set
    elif wanted.data_set is not None:
        yield data["data_set"].as_string() == wanted.data_set
    if wanted.prompt_id is not None:
        yield data["prompt_id"].as_string() == wanted.prompt_id
    if wanted.search is not None:
        texts = (data[name].as_string() for name in ("prompt", "response"))
        yield or_(*(text.icontains(wanted.search, autoescape=True) for text in texts))


def driven(session: Session) -> list[RunRow]:
    """Return the runs that have a driver or should have one."""
    return list(session.scalars(select(RunRow).where(RunRow.status.in_(list(DRIVEN)))))


def count_driven(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(RunRow).where(RunRow.status.in_(list(DRIVEN)))) or 0


def queue(session: Session) -> list[RunRow]:
    """Return the waiting runs in order. Only the columns that the supervisor needs are loaded, because it reads the
    queue every second and the queue may be long."""
    waiting = select(RunRow).where(RunRow.status == Status.QUEUED, RunRow.desired_state == DesiredState.RUN)
    columns = load_only(RunRow.id, RunRow.attempt, RunRow.status_reason)
    return list(
        session.scalars(waiting.options(columns).order_by(RunRow.priority.desc(), RunRow.created_at, RunRow.id))
    )


def unended(session: Session) -> list[RunRow]:
    return list(session.scalars(select(RunRow).where(RunRow.status.not_in(list(ENDED)))))


def leases(session: Session) -> list[tuple[LeaseRow, RunRow]]:
    return [tuple(row) for row in session.execute(select(LeaseRow, RunRow).join(RunRow))]  # type: ignore[misc]


def forget_run(session: Session, run_id: str) -> None:
    session.execute(delete(RunRow).where(RunRow.id == run_id))


class RunOrder(StrEnum):
    CREATED = "created"
    STARTED = "started"
    """Start of the first step; creation time for a run that has not started a step."""
    NAME = "name"
    STATUS = "status"
    PROGRESS = "progress"
    """Fraction of the steps that are done."""
    REWARD = "reward"
    """Mean reward of the last step."""
    HELD_OUT = "held_out"
    """Mean reward of the last evaluation on held-out prompts."""
    COST = "cost"
    TIME_LEFT = "time_left"


_COLUMNS: Mapping[RunOrder, ColumnElement[Any]] = {
    RunOrder.CREATED: RunRow.created_at.expression,
    RunOrder.STARTED: func.coalesce(RunRow.started_at, RunRow.created_at),
    RunOrder.NAME: RunRow.name.expression,
    RunOrder.STATUS: RunRow.status.expression,
    RunOrder.PROGRESS: cast(RunRow.step, Double) / RunRow.steps,
    RunOrder.REWARD: RunRow.latest["reward_mean"].as_float(),
    RunOrder.HELD_OUT: RunRow.latest["eval/reward_mean"].as_float(),
    RunOrder.COST: RunRow.cost_usd.expression,
    RunOrder.TIME_LEFT: RunRow.left_s.expression,
}

_MISSING = {RunOrder.REWARD, RunOrder.HELD_OUT, RunOrder.TIME_LEFT}
"""Keys that some runs lack. Runs without the key come last in both directions."""


def ordered_runs(
    session: Session,
    limit: int,
    after: str | None,
    statuses: Sequence[str],
    metadata: Mapping[str, str],
    by: RunOrder = RunOrder.CREATED,
    descending: bool = True,
) -> tuple[list[RunRow], bool]:
    """Return a page of runs, and whether there are more. Raises ApiError (404) if run `after` does not exist."""
    value = _COLUMNS[by]
    if by in _MISSING:
        value = func.coalesce(value, -sys.float_info.max if descending else sys.float_info.max)
    query = select(RunRow).order_by(*(key.desc() if descending else key.asc() for key in (value, RunRow.id)))
    if statuses:
        query = query.where(RunRow.status.in_(statuses))
    for name, label in metadata.items():
        query = query.where(_label(session, name) == label)
    if after is not None:
        run_of(session, after)
        last = select(value).where(RunRow.id == after).scalar_subquery()
        further = (value < last, RunRow.id < after) if descending else (value > last, RunRow.id > after)
        query = query.where(further[0] | ((value == last) & further[1]))
    return page(session, query, limit)


def _label(session: Session, name: str) -> ColumnElement[Any]:
    """Return the value of a label. SQLite's JSON paths have no escapes, so a quote in the name would break one."""
    if session.get_bind().dialect.name != "sqlite":
        return RunRow.run_metadata[name].as_string()
    labels = func.json_each(RunRow.run_metadata).table_valued("key", "value")
    return select(labels.c.value).where(labels.c.key == name).scalar_subquery()
