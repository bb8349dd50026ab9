"""Reads of a run's metrics, checkpoints, samples, usage and logs, and of replicas and devices now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse
from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, answers
from rlhfless.control.api.views import checkpoint_objects, object_of, rollout_object
from rlhfless.control.curves import FEWEST, Measured, curves, wanted_names
from rlhfless.control.database.tables import LeaseRow, MetricsRow, RunRow
from rlhfless.control.drivers import LOG_FILE as DRIVER_LOG
from rlhfless.control.lifecycle import DRIVEN
from rlhfless.control.objects.common import MOST_INTEGER, ListObject
from rlhfless.control.objects.costs import FunctionUsage, StaticFleet, UsageObject
from rlhfless.control.objects.fleet import DeviceKindObject, DevicesTimelineObject, HolderObject, ReplicaObject
from rlhfless.control.objects.runs import CheckpointObject, MetricsObject, RolloutObject
from rlhfless.planning.objects import PlannedCost
from rlhfless.telemetry.logs import LOG_FILE as RUN_LOG
from rlhfless.util.redaction import redacted_text
from rlhfless.util.tails import tail

router = APIRouter(tags=["runs"])

LOGS_DOC = answers("text/plain", {"type": "string"}, "The ends of the logs.")

MOST_POINTS = 5_000
"""Most points of a metric in one answer: four times the pixels of a wide chart."""


@router.get("/runs/{run_id}/metrics", summary="Metrics over the steps")
async def get_metrics(
    service: OfService,
    run_id: str,
    name: Annotated[
        list[str] | None, Query(description="Metrics, or families such as `reward`; by default all.")
    ] = None,
    after_step: Annotated[int, Query(ge=-1, le=MOST_INTEGER, description="Only later steps.")] = -1,
    until_step: Annotated[
        int | None, Query(ge=0, le=MOST_INTEGER, description="Only up to this step; by default to the newest.")
    ] = None,
    points: Annotated[
        int,
        Query(ge=FEWEST, le=MOST_POINTS, description="Most points per metric; first, last and extremes are kept."),
    ] = 1_000,
) -> MetricsObject:
    """One series per metric. An evaluation counts to the step that it follows; it may come after the step's metrics,
    so a client that follows a run asks again with `after_step` one less than the last `step`."""
    names = wanted_names(name or ())

    def read(session: Session) -> Sequence[Measured]:
        store.run_of(session, run_id)
        return metrics_texts(session, run_id, after_step, until_step)

    rows = await service.database.read(read)
    # Ten thousand steps take a tenth of a second, too long for the event loop.
    series = await asyncio.to_thread(curves, rows, names, points)
    return MetricsObject(run_id=run_id, step=rows[-1][0] if rows else max(after_step, 0), series=series)


def metrics_texts(session: Session, run_id: str, after_step: int, until_step: int | None) -> Sequence[Measured]:
    """The metrics by step, as JSON texts: an object for each row would take longer than all other work."""
    query = (
        select(MetricsRow.step, MetricsRow.at, cast(MetricsRow.values, Text))
        .where(MetricsRow.run_id == run_id, MetricsRow.step > after_step)
        .order_by(MetricsRow.step, MetricsRow.kind)
    )
    if until_step is not None:
        query = query.where(MetricsRow.step <= until_step)
    return [(row[0], row[1], row[2]) for row in session.execute(query)]


@router.get("/runs/{run_id}/checkpoints", summary="Checkpoints")
async def list_checkpoints(service: OfService, run_id: str) -> ListObject[CheckpointObject]:
    """The kept checkpoints, newest first."""
    run = await service.run(run_id)
    return ListObject(data=checkpoint_objects(run), has_more=False)


@router.get("/runs/{run_id}/rollouts", summary="Samples to read")
async def list_rollouts(
    service: OfService,
    run_id: str,
    step: Annotated[int | None, Query(ge=0, le=MOST_INTEGER, description="By default the newest steps.")] = None,
    before_step: Annotated[int | None, Query(ge=0, le=MOST_INTEGER, description="Only earlier steps.")] = None,
    data_set: Annotated[
        str | None, Query(max_length=200, description="`train`, `held_out`, or the name of a set of the spec.")
    ] = None,
    prompt_id: Annotated[str | None, Query(max_length=1_000, description="Of one prompt, over the steps.")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=200, description="A text in prompt or response, in any case.")
    ] = None,
    result: Annotated[
        Literal["failed", "zero", "nonzero"] | None, Query(description="Only samples whose reward is so.")
    ] = None,
    reward: Annotated[
        str | None, Query(max_length=200, description="The part of the reward that `result` is about; else the total.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ListObject[RolloutObject]:
    """A few samples of each of the newest steps and evaluations, the newest first: of four prompts each the samples
    with the lowest and the highest reward, and samples whose reward failed. Evaluations show the same prompts each
    time."""
    wanted = store.SampleFilter(step, before_step, data_set, prompt_id, search, result, reward)

    def read(session: Session) -> ListObject[RolloutObject]:
        store.run_of(session, run_id)
        rows = store.rollouts(session, run_id, wanted, limit + 1)
        return ListObject(data=[rollout_object(row) for row in rows[:limit]], has_more=len(rows) > limit)

    return await service.database.read(read)


@router.get("/runs/{run_id}/usage", summary="Devices and cost")
async def get_usage(service: OfService, run_id: str) -> UsageObject:
    """The usage by function over all attempts, with the plan and the best static fleet for comparison."""

    def read(session: Session) -> UsageObject:
        run = store.run_of(session, run_id)
        return UsageObject(
            run_id=run_id,
            functions=[object_of(FunctionUsage, row) for row in store.usage(session, run_id)],
            device_s=run.device_s,
            cost_usd=run.cost_usd,
            best_static=StaticFleet.model_validate(run.best_static) if run.best_static else None,
            planned=PlannedCost.model_validate(run.plan) if run.plan else None,
            measured=store.measured_cost(session, run_id),
        )

    return await service.database.read(read)


@router.get("/runs/{run_id}/logs", summary="Logs", response_class=PlainTextResponse, responses=LOGS_DOC)
async def get_logs(
    service: OfService,
    run_id: str,
    lines: Annotated[int, Query(ge=1, le=5_000, description="Of each of the two logs, the last ones.")] = 200,
) -> PlainTextResponse:
    """The end of the run's log, and of what its driver printed, each under a line with its name. Empty before the
    first driver has started."""
    run = await service.run(run_id)
    texts = [(name, await asyncio.to_thread(tail, Path(run.folder) / name, lines)) for name in (RUN_LOG, DRIVER_LOG)]
    text = "\n".join(f"==> {name} <==\n{content}" for name, content in texts if content)
    return PlainTextResponse(redacted_text(text), headers={"Cache-Control": "no-store"})


@router.get("/functions", tags=["fleet"], summary="Replicas now")
async def list_functions(
    service: OfService, run_id: Annotated[str | None, Query(description="Of one run.")] = None
) -> ListObject[ReplicaObject]:
    """Replicas of all running runs, as their drivers reported last."""
    query = select(RunRow.id).where(RunRow.status.in_(list(DRIVEN))).order_by(RunRow.created_at.desc())
    driven = await service.database.read(lambda session: list(session.scalars(query)))
    functions = [
        ReplicaObject(run_id=run, **replica.model_dump())
        for run in driven
        if run_id in (None, run)
        for replica in service.replicas.get(run, ())
    ]
    return ListObject(data=functions, has_more=False)


@router.get("/devices", tags=["fleet"], summary="Devices now")
async def list_devices(service: OfService) -> ListObject[DeviceKindObject]:
    """Devices by kind: their number, the free ones, and the runs that hold or wait for them."""
    leases = await service.database.read(store.leases)
    counts = service.device_counts()
    kinds = sorted({*counts, *(lease.kind for lease, _ in leases)})
    devices = [_kind(kind, counts.get(kind, 0), [pair for pair in leases if pair[0].kind == kind]) for kind in kinds]
    return ListObject(data=devices, has_more=False)


@router.get("/devices/timeline", tags=["fleet"], summary="Devices over the last minutes")
async def get_devices_timeline(
    service: OfService, minutes: Annotated[float, Query(gt=0, le=60)] = 15
) -> DevicesTimelineObject:
    """The recent work of runs on each device of the cluster."""
    return service.device_history.since(time.time() - 60 * minutes)


def _kind(kind: str, total: int, leases: Sequence[tuple[LeaseRow, RunRow]]) -> DeviceKindObject:
    in_order = sorted(leases, key=lambda pair: (pair[0].asked_at, pair[0].run_id))
    holders = [object_of(HolderObject, lease, name=run.name) for lease, run in in_order]
    taken = sum(max(holder.granted, holder.held) for holder in holders)
    return DeviceKindObject(kind=kind, total=total, free=max(total - taken, 0), runs=holders)
