"""Runs in an order, page by page: by one of their figures, and among equals by their ids."""

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
    """What runs can be put in order of."""

    CREATED = "created"
    STARTED = "started"
    """The first step; the creation where there was none yet."""
    NAME = "name"
    STATUS = "status"
    PROGRESS = "progress"
    """Steps done, of all steps."""
    REWARD = "reward"
    """Mean of the last step."""
    COST = "cost"
    TIME_LEFT = "time_left"


_OF: Mapping[RunOrder, ColumnElement[Any]] = {
    RunOrder.CREATED: RunRow.created_at.expression,
    RunOrder.STARTED: func.coalesce(RunRow.started_at, RunRow.created_at),
    RunOrder.NAME: RunRow.name.expression,
    RunOrder.STATUS: RunRow.status.expression,
    RunOrder.PROGRESS: cast(RunRow.step, Double) / RunRow.steps,
    RunOrder.REWARD: RunRow.latest["reward_mean"].as_float(),
    RunOrder.COST: RunRow.cost_usd.expression,
    RunOrder.TIME_LEFT: RunRow.left_s.expression,
}

_MISSING = {RunOrder.REWARD, RunOrder.TIME_LEFT}
"""What some runs do not have; it is last in both orders."""


def ordered_runs(
    session: Session,
    limit: int,
    after: str | None,
    statuses: Sequence[str],
    metadata: Mapping[str, str],
    by: RunOrder = RunOrder.CREATED,
    descending: bool = True,
) -> tuple[list[RunRow], bool]:
    """A page of runs, and whether there are more. Raises ApiError (404) if `after` is no run."""
    value = _OF[by]
    if by in _MISSING:
        value = func.coalesce(value, -sys.float_info.max if descending else sys.float_info.max)
    query = select(RunRow).order_by(*(one.desc() if descending else one.asc() for one in (value, RunRow.id)))
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
    """The value of a run's label. SQLite's own paths into JSON end at a quote in a name, and read no escapes."""
    if session.get_bind().dialect.name != "sqlite":
        return RunRow.run_metadata[name].as_string()
    labels = func.json_each(RunRow.run_metadata).table_valued("key", "value")
    return select(labels.c.value).where(labels.c.key == name).scalar_subquery()
