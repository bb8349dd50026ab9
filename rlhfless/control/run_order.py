"""Sorted lists of runs, page by page: by one of their columns, and among equals by id."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Double, cast, func, select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.database.tables import RunRow


class RunOrder(StrEnum):
    """The keys by which runs can be sorted."""

    CREATED = "created"
    STARTED = "started"
    """Start of the first step; the creation of a run that has not started a step."""
    NAME = "name"
    STATUS = "status"
    PROGRESS = "progress"
    """The share of the steps that is done."""
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
"""Keys that some runs lack; these runs come last in both directions."""


def ordered_runs(
    session: Session,
    limit: int,
    after: str | None,
    statuses: Sequence[str],
    metadata: Mapping[str, str],
    by: RunOrder = RunOrder.CREATED,
    descending: bool = True,
) -> tuple[list[RunRow], bool]:
    """A page of runs, and whether there are more. Raises ApiError (404) if there is no run `after`."""
    value = _COLUMNS[by]
    if by in _MISSING:
        value = func.coalesce(value, -sys.float_info.max if descending else sys.float_info.max)
    query = select(RunRow).order_by(*(key.desc() if descending else key.asc() for key in (value, RunRow.id)))
    if statuses:
        query = query.where(RunRow.status.in_(statuses))
    for name, label in metadata.items():
        query = query.where(_label(session, name) == label)
    if after is not None:
        store.run_of(session, after)
        last = select(value).where(RunRow.id == after).scalar_subquery()
        further = (value < last, RunRow.id < after) if descending else (value > last, RunRow.id > after)
        query = query.where(further[0] | ((value == last) & further[1]))
    return store.page(session, query, limit)


def _label(session: Session, name: str) -> ColumnElement[Any]:
    """The value of a run's label `name`. A quote in it would end a JSON path of SQLite, which has no escapes."""
    if session.get_bind().dialect.name != "sqlite":
        return RunRow.run_metadata[name].as_string()
    labels = func.json_each(RunRow.run_metadata).table_valued("key", "value")
    return select(labels.c.value).where(labels.c.key == name).scalar_subquery()
