"""Moves every run from its status to its desired state: starts drivers, detects dead ones, resumes runs.

The supervisor reads the database every second and keeps no other state, so a restart of the service loses nothing.
Items that a driver could not deliver are read from the outbox in the run's folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.broker import Decisions, DevicesRequest, decide, wanted_devices
from rlhfless.control.database.access import Database
from rlhfless.control.database.tables import KeyRow, LeaseRow, RunRow
from rlhfless.control.delivery import DriverExit, DriverOrder, failure
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.drivers import LOG_FILE, LOG_START, Drivers
from rlhfless.control.ingest import apply_items, end, refuse_folder, stop_out_of_memory
from rlhfless.control.lifecycle import DRIVEN, ENDED, DesiredState, Status
from rlhfless.control.periodic import PeriodicTask
from rlhfless.control.process_limits import says_out_of_memory
from rlhfless.control.ray_host import RayReport
from rlhfless.control.settings import SERVICE_FILE, ServiceSettings
from rlhfless.scaling.sizes import SpeedCurve
from rlhfless.scaling.sizing import Team
from rlhfless.spec import TimeoutsSpec

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Time between two checks of the runs. A driver takes ten times as long to start."""

KILL_AFTER_S = 35.0
"""Delay after `timeouts.stop_s` until a cancelled driver is killed, so that it can deliver its outbox."""


class Supervisor(PeriodicTask):
    """Reconciles each run's status with its desired state."""

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        drivers: Drivers,
        url: str,
        ray: Callable[[], RayReport | None],
        ray_wait: Callable[[], str],
    ) -> None:
        """`url`: where drivers reach the service. `ray`: the report of the runs' Ray; None while there is none.
        `ray_wait`: why there is none."""
        super().__init__(PERIOD_S)
        self._database = database
        self._settings = settings
        self._drivers = drivers
        self._url = url
        self._ray = ray
        self._ray_wait = ray_wait
        self.admits = True
        """Whether new drivers may be started."""
        self.yields: set[str] = set()
        """Runs that must yield their devices at the end of their step."""
        self.lease_reasons: dict[str, str] = {}
        """Why each run waits for devices, by run id."""
        self.wanted: dict[str, int] | None = None
        """Devices to request from an autoscaler, by kind (broker.wanted_devices); None without `capacity`, or before
        the first decision."""

    async def tick(self) -> None:
        for run in await self._database.read(store.driven):
            await self._check(run)
        await self._grant_devices()
        if self.admits:
            await self._admit()

    # -- running drivers

    async def _check(self, run: RunRow) -> None:
        handle = run.driver
        if handle is None or not await asyncio.to_thread(self._drivers.alive, handle):
            await self._settle_dead(run)
        elif run.desired_state == DesiredState.CANCEL:
            stop_s = ((run.resolved or run.spec).get("timeouts") or {}).get("stop_s", TimeoutsSpec().stop_s)
            if time.time() - run.desired_at > stop_s + KILL_AFTER_S:
                log.warning("%s: driver does not end; killing it", run.id)
                await asyncio.to_thread(self._drivers.kill, handle)

    async def _settle_dead(self, run: RunRow) -> None:
        """Apply the outbox of a dead driver, and queue the run for another driver unless it has ended."""
        why, hindrance, out_of_memory = "its driver was not started", "", False
        if run.driver is not None:
            log_file, log_start = Path(run.folder) / LOG_FILE, run.driver.get(LOG_START, 0)
            out_of_memory = await asyncio.to_thread(says_out_of_memory, log_file, log_start)
            why = await asyncio.to_thread(self._drivers.ended_by, run.driver)
            hindrance = await asyncio.to_thread(self._drivers.hindrance, run.driver)
        items = await asyncio.to_thread(undelivered, Path(run.folder), run.pushed)

        def settle(session: Session) -> None:
            row = store.run_of(session, run.id)
            if row.attempt != run.attempt or row.status not in DRIVEN:
                return
            apply_items(session, row, items)
            if row.status in DRIVEN and hindrance:
                refuse_folder(session, row, hindrance)
            elif row.status in DRIVEN and out_of_memory:
                stop_out_of_memory(session, row)
            elif row.status in DRIVEN:
                error = failure("driver_died", why)
                end(session, row, DriverExit(status=Status.QUEUED, reason=why, error=error, retry=True))

        await self._database.write(settle)

    # -- devices

    async def _grant_devices(self) -> None:
        ray, now = self._ray(), time.time()
        if ray is None:
            return  # unknown devices are not lost ones
        most = ray.devices | self._settings.capacity

        def grant(session: Session) -> None:
            rows = store.leases(session)
            quotas = self._settings.quotas
            teams = {name: Team(quota.weight, quota.max_devices) for name, quota in quotas.items()}
            names = _names_of_keys(session, teams)
            requests = (request_of(lease, run) for lease, run in rows)
            named = [replace(request, owner=names.get(request.owner, request.owner)) for request in requests]
            decisions = decide(named, ray.devices, now, ray.by_node, teams, most)
            if self._settings.capacity:
                self.wanted = wanted_devices(named, self._settings.capacity, teams, now)
            for lease, run in rows:
                if lease.run_id in decisions.granted:
                    _grant(session, lease, run, decisions)
            self.yields = set(decisions.yields)
            self.lease_reasons = dict(decisions.reasons)

        await self._database.write(grant)

    # -- drivers to start

    async def _admit(self) -> None:
        """Start drivers for the first runs of the queue, up to the driver limit. Start none while there is no Ray."""
        wait = self._ray_wait()

        def next_runs(session: Session) -> list[RunRow]:
            working = store.count_driven(session)
            free = 0 if wait else max(self._settings.max_drivers - working, 0)
            queue = store.queue(session)
            for place, row in enumerate(queue[free:]):
                ahead = f"{place} run(s) ahead" if place else "it is next"
                reason = wait or f"queued: {ahead}, {working} running"
                if row.status_reason != reason and row.attempt == 0:
                    row.status_reason = reason
                    store.touch(session, row)
            return queue[:free]

        for run in await self._database.write(next_runs):
            await self._begin(run)

    async def _begin(self, run: RunRow) -> None:
        """Start the next driver of a run.

        The attempt is stored before its driver starts, so no second driver can start.
        """
        token = secrets.token_urlsafe(32)

        def begin(session: Session) -> RunRow | None:
            row = store.run_of(session, run.id)
            if row.status != Status.QUEUED or row.desired_state != DesiredState.RUN or row.attempt != run.attempt:
                return None
            row.attempt += 1
            row.driver_token = hashlib.sha256(token.encode()).hexdigest()
            store.set_status(session, row, Status.VALIDATING, "starting its driver")
            return row

        begun = await self._database.write(begin)
        if begun is None:
            return
        folder, order = Path(begun.folder), self._order(begun, token)

        def start() -> dict[str, object]:
            folder.mkdir(parents=True, exist_ok=True)
            return self._drivers.start(folder, order)

        handle = await asyncio.to_thread(start)

        def note(session: Session) -> None:
            row = store.run_of(session, run.id)
            if row.attempt == begun.attempt:
                row.driver = handle

        await self._database.write(note)

    def _order(self, run: RunRow, token: str) -> DriverOrder:
        settings = self._settings
        return DriverOrder(
            run_id=run.id,
            attempt=run.attempt,
            token=token,
            service_file=str(settings.folder / SERVICE_FILE),
            service_url=self._url if settings.elsewhere else None,
            ray_address=ray.address if (ray := self._ray()) else "",
            one_machine=settings.ray_address is None,
            http_hosts=list(settings.http_hosts),
            roots=list(settings.roots),
            allow_hub=settings.allow_hub,
            spec=run.spec,
            sizes=settings.sizes.model_dump(),
            memory_gib=settings.driver_memory_gib,
            priority=run.priority,
            capacity=settings.capacity,
        )

    async def stop_all(self) -> None:
        """Ask all drivers to stop cleanly. Their runs resume when the service runs again."""
        for run in await self._database.read(store.driven):
            if run.driver is not None:
                await asyncio.to_thread(self._drivers.stop, run.driver)


def request_of(lease: LeaseRow, run: RunRow) -> DevicesRequest:
    """Return what the broker knows of a run: its lease, its plan, and its measured steps."""
    planned = run.sizes or {}
    most = planned.get("maximum") or max(lease.sizes, default=0)
    sizes = tuple(size for size in lease.sizes if size <= most) or tuple(lease.sizes[:1])
    steps = {each["devices"]: each["step_s"] for each in planned.get("sizes", ()) if each["step_s"]}
    curve = SpeedCurve(steps).measured({int(size): seconds for size, seconds in lease.seen_s.items()})
    return DevicesRequest(
        owner=run.owner,
        priority=run.priority,
        run_id=run.id,
        kind=lease.kind,
        minimum=lease.minimum,
        maximum=sizes[-1] if sizes else lease.maximum,
        unit=lease.unit,
        granted=lease.granted,
        held=lease.held,
        asked_at=lease.asked_at,
        tenants=lease.tenants,
        sizes=sizes,
        curve=curve,
        steps_left=lease.steps_left,
        change_s=lease.change_s,
        needed=_needed(run, sizes, curve),
    )


def _names_of_keys(session: Session, names: Collection[str]) -> dict[str, str]:
    """Return the names of the API keys with these names, by id: also of revoked ones, whose runs go on."""
    if not names:
        return {}
    query = select(KeyRow.id, KeyRow.name).where(KeyRow.name.in_(list(names)))
    return dict(session.execute(query).tuples().all())


def _needed(run: RunRow, sizes: Sequence[int], curve: SpeedCurve) -> int:
    """Return the fewest devices that keep the deadline of a run's contract; 0 without one, or if none keeps it."""
    contract = ((run.spec.get("scaling") or {}).get("contract")) or {}
    if contract.get("type") != "cheapest" or not curve.step_s:
        return 0
    limit_s = contract["deadline_s"] if contract.get("per", "step") == "step" else contract["deadline_s"] / run.steps
    return next((size for size in sizes if curve.at(size) <= limit_s), 0)


def _grant(session: Session, lease: LeaseRow, run: RunRow, decisions: Decisions) -> None:
    """Change a run's grant. For an elastic run, an event says why."""
    before, lease.granted = lease.granted, decisions.granted[lease.run_id]
    if lease.sizes:
        lease.size_reason = decisions.changes.get(run.id) or f"starts on {lease.granted} device(s)"
        data = {"before": before, "after": lease.granted}
        store.add_event(session, run, "size", lease.size_reason, data=data)
    store.touch(session, run)


SWEEP_S = 600.0
"""Time between two retention sweeps; retention is counted in days."""

SECONDS_PER_DAY = 86_400.0


class RetentionSweep(PeriodicTask):
    def __init__(self, database: Database, settings: ServiceSettings) -> None:
        super().__init__(SWEEP_S)
        self._database = database
        self._settings = settings

    async def tick(self) -> None:
        await sweep(self._database, self._settings, time.time())


async def sweep(database: Database, settings: ServiceSettings, now_s: float) -> list[str]:
    """Remove the runs that ended more than `retention.days` ago, and return their ids."""
    if settings.retention.days is None:
        return []
    before_s = now_s - settings.retention.days * SECONDS_PER_DAY

    def forget(session: Session) -> list[tuple[str, str]]:
        query = select(RunRow).where(RunRow.status.in_(list(ENDED)), RunRow.finished_at < before_s)
        rows = list(session.scalars(query))
        for row in rows:
            store.forget_run(session, row.id)
            store.touch(session, row)
        return [(row.id, row.folder) for row in rows]

    removed = await database.write(forget)
    for run_id, folder in removed:
        await asyncio.to_thread(remove_folder, Path(folder), settings)
        log.info("removed %s: ended more than %g days ago", run_id, settings.retention.days)
    return [run_id for run_id, _ in removed]


def remove_folder(folder: Path, settings: ServiceSettings) -> None:
    """Remove a run's folder, if it is in the service's folder of runs."""
    if folder.parent == settings.runs:
        shutil.rmtree(folder, ignore_errors=True)
