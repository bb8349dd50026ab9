"""The metrics of a run as thinned curves, one per name.

A chart is a few hundred pixels wide. A long curve keeps its first and last point. The points between them are divided
into bins of equal width, and each bin keeps its lowest and highest point, so a spike of one step stays visible.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query
from pydantic_core import from_json
from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import OfService
from rlhfless.control.database.tables import MetricsRow
from rlhfless.control.errors import ApiError
from rlhfless.control.objects import MOST_INTEGER, MetricsObject, Series
from rlhfless.spec.explain import closest
from rlhfless.telemetry.metrics import METRICS, Kind

router = APIRouter(tags=["runs"])

Measured = tuple[int, float, str]
"""Step, unix time, and the metrics as JSON text."""

MOST_POINTS = 5_000
"""Maximum number of points of a metric in one answer: four times the pixels of a wide chart."""

FEWEST = 4
"""Minimum number of points of a thinned curve: first, last, and the two extremes of one bin."""


@router.get("/runs/{run_id}/metrics", summary="Metrics over the steps")
async def get_metrics(
    service: OfService,
    run_id: str,
    name: Annotated[
        list[str] | None, Query(description="Metrics, or families such as `reward`. By default all.")
    ] = None,
    after_step: Annotated[int, Query(ge=-1, le=MOST_INTEGER, description="Only later steps.")] = -1,
    until_step: Annotated[
        int | None, Query(ge=0, le=MOST_INTEGER, description="Only steps up to this one. By default all.")
    ] = None,
    points: Annotated[
        int,
        Query(ge=FEWEST, le=MOST_POINTS, description="Maximum points per metric. First, last and extremes are kept."),
    ] = 1_000,
) -> MetricsObject:
    """Return one series per metric. An evaluation belongs to the step that it follows, and may arrive after the step's
    metrics. A client that follows a run therefore polls with `after_step` set to one less than the last `step`."""
    names = wanted_names(name or ())

    def read(session: Session) -> Sequence[Measured]:
        store.run_of(session, run_id)
        return metrics_texts(session, run_id, after_step, until_step)

    rows = await service.database.read(read)
    # Ten thousand steps take a tenth of a second, too long for the event loop.
    series = await asyncio.to_thread(curves, rows, names, points)
    return MetricsObject(run_id=run_id, step=rows[-1][0] if rows else max(after_step, 0), series=series)


def metrics_texts(session: Session, run_id: str, after_step: int, until_step: int | None) -> Sequence[Measured]:
    """Return the metrics by step as JSON text. An object per row would take longer than everything else."""
    query = (
        select(MetricsRow.step, MetricsRow.at, cast(MetricsRow.values, Text))
        .where(MetricsRow.run_id == run_id, MetricsRow.step > after_step)
        .order_by(MetricsRow.step, MetricsRow.kind)
    )
    if until_step is not None:
        query = query.where(MetricsRow.step <= until_step)
    return [(row[0], row[1], row[2]) for row in session.execute(query)]


def wanted_names(names: Iterable[str]) -> frozenset[str]:
    """Return the requested names; empty for all.

    The name of a family or histogram selects all its members. Raises ApiError (422) for an unknown name.
    """
    wanted = frozenset(names)
    for name in wanted:
        if name.partition("/")[0] not in METRICS:
            near = closest(name, METRICS)
            hint = f"; did you mean {near!r}?" if near else "; without `name` all are answered"
            raise ApiError(422, "invalid_request", f"there is no metric {name!r}{hint}", "name")
    return wanted


def curves(rows: Sequence[Measured], names: frozenset[str], points: int) -> list[Series]:
    """Return one curve per metric, in declaration order, each with at most `points` points."""
    parsed: list[dict[str, float | None]] = from_json(f"[{','.join(row[2] for row in rows)}]")
    steps = np.array([row[0] for row in rows])
    times = np.array([row[1] for row in rows])
    present = set[str]().union(*parsed)
    if names:
        present = {name for name in present if name in names or name.partition("/")[0] in names}
    return [_curve(name, parsed, steps, times, points) for name in sorted(present, key=_declared)]


_ORDER = {name: place for place, name in enumerate(METRICS)}


def _declared(name: str) -> tuple[int, str]:
    return _ORDER.get(name.partition("/")[0], len(_ORDER)), name


def _curve(name: str, rows: Sequence[dict[str, float | None]], steps: Any, times: Any, points: int) -> Series:
    """Return the curve of one metric. None is kept as a gap; rows without the metric are skipped."""
    column = np.array([row.get(name, math.inf) for row in rows], dtype=float)
    places = np.flatnonzero(~np.isposinf(column))
    chosen = places[kept(column[places], points)]
    unit, text = described(name)
    values = column[chosen]
    return Series(
        name=name,
        unit=unit,
        help=text,
        steps=steps[chosen].tolist(),
        at=times[chosen].tolist(),
        values=[None if math.isnan(value) else value for value in values.tolist()],
    )


def described(name: str) -> tuple[str, str]:
    """Return unit and description of a metric. A histogram is stored as its quantiles, `<name>/p<percent>`."""
    family, _, label = name.partition("/")
    metric = METRICS.get(family)
    if metric is None:
        return "", "A figure that this version does not know"
    if metric.kind is Kind.HISTOGRAM and label:
        return str(metric.unit), f"{metric.help}: {label.removeprefix('p')} percent are at most so long"
    return str(metric.unit), metric.help if not label else f"{metric.help}: {label}"


def kept(values: npt.NDArray[np.float64], points: int) -> npt.NDArray[np.intp]:
    """Return the indices of the points to keep, in order: at most `points` (at least FEWEST).

    NaN stays only in a bin without other values.
    """
    count = len(values)
    if count <= points:
        return np.arange(count)
    bins = (points - 2) // 2
    edges = np.linspace(1, count - 1, bins + 1).astype(np.intp)
    width = int(np.max(np.diff(edges)))
    places = edges[:-1, None] + np.arange(width)  # [bins, width]
    before_edge = places < edges[1:, None]
    places = np.where(before_edge, places, edges[:-1, None])
    binned = values[places]
    lowest = np.argmin(np.where(np.isnan(binned), np.inf, binned), axis=1)
    highest = np.argmax(np.where(np.isnan(binned), -np.inf, binned), axis=1)
    row = np.arange(bins)
    return np.unique(np.concatenate([[0, count - 1], places[row, lowest], places[row, highest]]))
