"""A service: its database, its runs' events, its periodic tasks, and the state of its Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import IO

from rlhfless.control import store
from rlhfless.control.compute.forecasts import Forecasts, Simulations
from rlhfless.control.compute.runner import Runner
from rlhfless.control.database.access import Database, database_of, migrate
from rlhfless.control.database.tables import RunRow
from rlhfless.control.drivers import Drivers
from rlhfless.control.fleets import Fleets
from rlhfless.control.keys import Keys
from rlhfless.control.objects import DevicesTimelineObject, DeviceWork, ReplicaNow, RunBar, SharedDeviceRow
from rlhfless.control.pods import PodWatch, pod_lister
from rlhfless.control.ray_host import RAY_FILE, STALE_S, RayReport, read_fault, read_ray
from rlhfless.control.run_events import RunEvents
from rlhfless.control.settings import SERVICE_FILE, ServiceSettings, open_data
from rlhfless.control.supervisor import RetentionSweep, Supervisor
from rlhfless.functions.loopback import is_loopback
from rlhfless.util.errors import UserError
from rlhfless.util.folders import lock, replace_text

HISTORY_S = 3600.0
HISTORY_BARS = 2000
"""Maximum number of bars per device, about 200 bytes each: an hour of 2 s phases."""


class DeviceHistory:
    """The recent work of all runs by device, in memory. Traces contain all of it."""

    def __init__(self) -> None:
        self._bars: dict[str, deque[RunBar]] = defaultdict(lambda: deque(maxlen=HISTORY_BARS))

    def add(self, run_id: str, worked: Sequence[DeviceWork], now_s: float) -> None:
        """Add the work that a driver reports, and drop work older than HISTORY_S."""
        for work in worked:
            for device in work.devices:
                self._bars[device].append(RunBar(run_id=run_id, **work.model_dump(exclude={"devices"})))
        for device, bars in list(self._bars.items()):
            while bars and bars[0].end_s < now_s - HISTORY_S:
                bars.popleft()
            if not bars:
                del self._bars[device]

    def since(self, since_s: float) -> DevicesTimelineObject:
        rows = [(device, [bar for bar in bars if bar.end_s > since_s]) for device, bars in sorted(self._bars.items())]
        return DevicesTimelineObject(rows=[SharedDeviceRow(device=device, bars=bars) for device, bars in rows if bars])


LOCK_FILE = "service.lock"


class DataInUse(UserError):
    """Another service uses the data folder."""


class Service:
    def __init__(self, settings: ServiceSettings, database: Database, drivers: Drivers, address: str) -> None:
        """`address`: where the service answers, for example http://127.0.0.1:8080."""
        self.settings = settings
        self.database = database
        self.address = address
        self.run_events = RunEvents(asyncio.get_running_loop())
        self.keys = Keys(database, required=not is_loopback(settings.host))
        self.supervisor = Supervisor(database, settings, drivers, self.url, self.ray, self.ray_wait)
        self.runner = Runner()
        self.forecasts = Forecasts(database, self.runner, self.device_counts)
        self.simulations = Simulations(database, self.runner)
        self.device_history = DeviceHistory()
        self.replicas: dict[str, list[ReplicaNow]] = {}
        """Replicas by run id, as last reported by the run's driver."""
        self.fleets = Fleets()
        self.host_token = secrets.token_urlsafe(32)
        """The secret of the host in a remote cluster. A later service has another secret, so this host then exits."""
        self._ray_report: RayReport | None = None
        self.pods = PodWatch(pod_lister(settings.ray_cluster, settings.watch_nodes)) if settings.ray_cluster else None
        database.on_commit = self.run_events.publish

    @property
    def url(self) -> str:
        """The address for clients and drivers."""
        return self.settings.public_url or self.address

    def ray(self) -> RayReport | None:
        """Return the report of the runs' Ray cluster; None while there is none."""
        if not self.settings.elsewhere:
            return read_ray(self.settings.folder / RAY_FILE)
        report = self._ray_report
        return report if report is not None and time.time() - report.at < STALE_S else None

    def update_ray_report(self, report: RayReport) -> None:
        self._ray_report = replace(report, at=time.time())  # by this machine's clock

    def ray_wait(self) -> str:
        """Return what the service waits for while it has no Ray, and why; empty if it has Ray."""
        if self.ray() is not None:
            return ""
        where = self.settings.ray_address
        wait = f"waiting for the Ray cluster at {where}" if where else "waiting for Ray to start"
        fault = read_fault(self.settings.folder)
        return f"{wait}: {fault}" if fault else wait

    def device_counts(self) -> dict[str, int]:
        """Return the devices that runs may hold together, by kind: with `capacity`, also those that are yet to come."""
        ray = self.ray()
        return (ray.devices if ray else {}) | self.settings.capacity

    async def run(self, run_id: str) -> RunRow:
        """Return a run. Raises ApiError (404)."""
        return await self.database.read(lambda session: store.run_of(session, run_id))

    def announce(self) -> None:
        """Write the service's address into its folder, for running drivers and the command line."""
        content = {"url": self.url, "pid": os.getpid(), "started_at": time.time()}
        replace_text(self.settings.folder / SERVICE_FILE, json.dumps(content))

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        await self.keys.read()
        self.announce()
        sweep = RetentionSweep(self.database, self.settings)
        async with contextlib.AsyncExitStack() as stack:
            for task in (self.supervisor, self.forecasts, self.simulations, sweep, self.pods):
                if task is not None:
                    await stack.enter_async_context(task)
            stack.callback(asyncio.create_task(self.runner.prepare()).cancel)
            yield


def open_database(settings: ServiceSettings) -> Database:
    """Open and migrate the database, as its only writing service. Raises InputError, SecondService or NewerDatabase."""
    database = database_of(settings)
    database.require_only_service()
    migrate(database.engine)
    return database


def lock_data(settings: ServiceSettings) -> IO[str]:
    """Lock the data folder while the returned file is open. Raises DataInUse or NotPrivate."""
    folder = open_data(settings)
    file = lock(folder / LOCK_FILE)
    if file is None:
        raise DataInUse(f"another rlhfless service uses {folder}; stop it (rlhfless down), or name another --data")
    return file
