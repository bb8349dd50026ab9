"""Replicas and devices of all runs, now and over the last minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, object_of
from rlhfless.control.database.tables import LeaseRow, RunRow
from rlhfless.control.lifecycle import DRIVEN
from rlhfless.control.objects import (
    DeviceKindObject,
    DevicesTimelineObject,
    ListObject,
    ReplicaObject,
    ReservationObject,
)

router = APIRouter(tags=["fleet"])


@router.get("/functions", summary="Replicas now")
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


@router.get("/devices", summary="Devices now")
async def list_devices(service: OfService) -> ListObject[DeviceKindObject]:
    """Devices by kind: their number, the free ones, and the runs that hold or wait for them."""
    leases = await service.database.read(store.leases)
    counts = service.device_counts()
    kinds = sorted({*counts, *(lease.kind for lease, _ in leases)})
    devices = [_kind(kind, counts.get(kind, 0), [pair for pair in leases if pair[0].kind == kind]) for kind in kinds]
    return ListObject(data=devices, has_more=False)


@router.get("/devices/timeline", summary="Devices over the last minutes")
async def get_devices_timeline(
    service: OfService, minutes: Annotated[float, Query(gt=0, le=60)] = 15
) -> DevicesTimelineObject:
    """The recent work of runs on each device of the cluster."""
    return service.device_history.since(time.time() - 60 * minutes)


def _kind(kind: str, total: int, leases: Sequence[tuple[LeaseRow, RunRow]]) -> DeviceKindObject:
    in_order = sorted(leases, key=lambda pair: (pair[0].asked_at, pair[0].run_id))
    reservations = [object_of(ReservationObject, lease, name=run.name) for lease, run in in_order]
    taken = sum(max(each.granted, each.held) for each in reservations)
    return DeviceKindObject(kind=kind, total=total, free=max(total - taken, 0), runs=reservations)
