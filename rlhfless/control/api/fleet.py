"""Replicas and devices of all runs, now and over the last minutes."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, object_of
from rlhfless.control.database.tables import RunRow
from rlhfless.control.lifecycle import DRIVEN
from rlhfless.control.objects import (
    DeviceKindObject,
    DevicesTimelineObject,
    FleetObject,
    ListObject,
    ReplicaObject,
    ReservationObject,
)

router = APIRouter(tags=["fleet"])


@router.get("/functions", summary="Replicas now")
async def list_functions(
    service: OfService, run_id: Annotated[str | None, Query(description="Only replicas of this run.")] = None
) -> ListObject[ReplicaObject]:
    """List the replicas of all running runs, as last reported by their drivers."""
    query = select(RunRow.id).where(RunRow.status.in_(list(DRIVEN))).order_by(RunRow.created_at.desc())
    driven = await service.database.read(lambda session: list(session.scalars(query)))
    functions = [
        ReplicaObject(run_id=run, **replica.model_dump())
        for run in driven
        if run_id in (None, run)
        for replica in service.replicas.get(run, ())
    ]
    return ListObject(data=functions, has_more=False)


@router.get("/fleets", summary="Runs that share engines")
async def list_fleets(service: OfService) -> ListObject[FleetObject]:
    """List the fleets of runs with `placement.share`: their engines, and the device time of each run, since the service
    started."""
    return ListObject(data=service.fleets.objects(time.time()), has_more=False)


@router.get("/devices", summary="Devices now")
async def list_devices(service: OfService) -> ListObject[DeviceKindObject]:
    """List devices by kind: their number, the free ones, and the runs that hold or wait for them."""
    leases = await service.database.read(store.leases)
    leases.sort(key=lambda pair: (pair[0].asked_at, pair[0].run_id))
    counts, devices = service.device_counts(), []
    for kind in sorted({*counts, *(lease.kind for lease, _ in leases)}):
        total = counts.get(kind, 0)
        runs = [object_of(ReservationObject, lease, name=run.name) for lease, run in leases if lease.kind == kind]
        free = max(total - sum(max(each.granted, each.held) for each in runs), 0)
        devices.append(DeviceKindObject(kind=kind, total=total, free=free, runs=runs))
    return ListObject(data=devices, has_more=False)


@router.get("/devices/timeline", summary="Devices over the last minutes")
async def get_devices_timeline(
    service: OfService, minutes: Annotated[float, Query(gt=0, le=60)] = 15
) -> DevicesTimelineObject:
    """Return the recent work of runs on each device of the cluster."""
    return service.device_history.since(time.time() - 60 * minutes)
